"""Programs that show a cluster over HTTP: numbers for Prometheus, and a page.

- `exposition`: the metrics of one moment, in the text format of Prometheus; `exporter` answers scrapes.
- `rows`: rows of the page's tables, `json_form`: objects as JSON; both pure.
- `live`: tables that are asked once for all open pages, `job_tables`: those of jobs, `event_stream`: how their changes
  are sent; `dashboard`: the server of the page; ``page/``: the page itself, without a build step.
- `connection`: both programs are clients of the controller.

Programs of their own and not parts of the controller: HTTP and formatting take no time of the scheduler's loop, no port
of the controller speaks HTTP, and what is shown is what the role of the key may see. Needs ``fray[monitoring]``.
"""
