"""Options of ``fray rl``. Only argparse is imported here."""

from __future__ import annotations

from fray.cli.parsing import Parser, Verbs, verb, verb_group


def add_rl(verbs: Verbs) -> None:
    """Add ``fray rl`` and its verbs."""
    below = verb_group(verbs, "rl", "train language models with rewards: run recipes, look at runs")
    parser = verb(
        below,
        "run",
        "rl.start:run",
        "run a recipe until it ends",
        "  fray rl run recipe.yaml trainer.lr=2e-5\n  fray rl run recipe.yaml --dry\n"
        "  fray rl run recipe.yaml --detach --cluster fray://host:port",
        opens="a loop",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file; see docs/rl-recipes.md")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="replace settings: trainer.steps=10")
    parser.set_defaults(more="overrides")
    parser.add_argument(
        "--dry", action="store_true", help="print all settings and the processes with what they reserve, and stop"
    )

    parser.add_argument(
        "--detach",
        action="store_true",
        help="run it as a job of the cluster, which starts it again when it is lost; print the job's id, and stop",
    )

    parser = verb(
        below,
        "top",
        "rl.look:top",
        "show what a run does, each second",
        "  fray rl top digits\n  fray rl top ./out --once --json",
        opens="itself",
    )
    _add_run_name(parser)
    parser.add_argument("--once", action="store_true", help="print it once")

    parser = verb(
        below,
        "show",
        "rl.look:show",
        "show the groups of a step: prompts, answers, rewards, versions, and what failed",
        "  fray rl show digits --step 40\n  fray rl show ./out --step 40 --worst 5",
        opens="itself",
    )
    _add_run_name(parser)
    parser.add_argument("--step", type=int, metavar="N", help="number of the update (default: the last)")
    parser.add_argument("--worst", type=int, metavar="K", help="only the K groups with the lowest mean rewards")

    parser = verb(
        below,
        "scale",
        "rl.change:scale",
        "let inference servers join or leave a run that is running",
        "  fray rl scale digits servers=4",
        opens="itself",
    )
    _add_run_name(parser)
    parser.add_argument("settings", metavar="servers=N", help="number of inference servers")

    parser = verb(
        below,
        "stop",
        "rl.change:stop",
        "let a run that is running end after the update under way, which is saved",
        "  fray rl stop digits",
        opens="itself",
    )
    _add_run_name(parser)

    parser = verb(
        below,
        "replay",
        "rl.look:replay",
        "train a step again from its recorded rollouts, without servers, and compare the metrics",
        "  fray rl replay digits --step 40",
        opens="itself",
    )
    _add_run_name(parser)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="number of the update")

    verb(below, "ls", "rl.look:ls", "list the runs that were started on this machine", "  fray rl ls", opens="itself")


def _add_run_name(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of the run, or its output directory")
