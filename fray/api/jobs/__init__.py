"""Jobs: from a request to a spec that is sent, and handles.

In order of dependency:

    job_spec    builds the specs of every kind of launch, and pickles the payloads
    job         `Job`, and the error of a job's end
    job_group   `JobGroup`
"""
