"""Rollouts: episodes of the user's code with replies of the model, in processes without torch.

- `scores`: results of an episode, and the trajectory of its turns; pure.
- `server_choice`: which inference server gets a request, and its repetition when that server is lost.
- `request_batches`: requests that begin together, in one message to a server.
- `process`: the actor that runs the episodes of many workers.
"""
