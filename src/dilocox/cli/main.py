"""The `dilocox` command: parse the arguments, call one function, print its result."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dilocox.cli import (
    attest,
    audit,
    availability,
    chain,
    evaluate,
    export,
    generate,
    plan,
    publish,
    report,
    serve,
    status,
    terms,
    verify,
    witness,
)
from dilocox.cli import testbed as lab_command
from dilocox.errors import ConfigError, DilocoxError
from dilocox.utils.file_errors import file_problem
from dilocox.utils.plain_text import plain, plain_lines
from dilocox.utils.secret_text import hide_secrets
from dilocox.version import __version__

EXAMPLES = """\
examples:
  dilocox train examples/quickstart.toml
  dilocox train run.toml --set outer.rounds=20 --set inner.learning_rate=2e-3
  dilocox train run.toml --resume
  dilocox train run.toml --trace             (a timeline: runs/NAME/trace.json)
  dilocox coordinator run.toml               (prints the join line for every site)
  dilocox join HOST:PORT --site lyon --run-file run.toml --token-file token
  dilocox leave runs/run --site lyon         (after its round; where the coordinator runs)
  dilocox leave runs/run --site lyon --ban   (at once and for good)
  dilocox handover runs/run --to start       (to go on with other sites, stages or shards)
  dilocox plan examples/two-sites.toml --gpu h100-80g:2 --link 1gbit
  dilocox plan --terms URL --gpu rtx3090:2 --link 500mbit   (what your GPUs would earn)
  dilocox data prepare run.toml
  dilocox data show runs/quickstart/data
  dilocox generate runs/quickstart --prompt "def main():"
  dilocox evaluate runs/run BASE --tasks arc_easy,hellaswag   (models side by side)
  dilocox generate runs/support --chat --prompt "How do I pay?"
  dilocox serve runs/support                 (for programs that speak the protocol of OpenAI)
  dilocox verify runs/quickstart             (how its model was made, from the record alone)
  dilocox status runs/run                    (what the run does; at the coordinator or at a site)
  dilocox report runs/quickstart             (its page: runs/quickstart/report.html)
  dilocox publish runs/run --to public       (page, record and model in one folder, without keys)
  dilocox publish runs/run --to s3://b/run   (the same into storage, in bundles, also beside a run)
  dilocox availability runs/run --store S    (asks sites' stores for pieces of its payloads)
  dilocox audit runs/run --sample 5%         (repeats rounds; needs record.states_every)
  dilocox auditor runs/run --key mine        (audits a run while it goes on, until it ends)
  dilocox attest runs/run --site lyon --follow   (files what the site's machine vouches for)
  dilocox chain account runs/run             (what the run owes to whom; needs [settlement])
  dilocox witness serve w1                   (cosigns the logs of runs; made by witness create)
  dilocox export runs/quickstart --to my-model
  dilocox lab run.toml --link 20mbit         (on shaped links on this machine; needs root)
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of `dilocox` and of `python -m dilocox`, and exit with its code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not hasattr(options, "call"):
        parser.print_help()
        sys.exit(2)
    try:
        sys.exit(options.call(options))
    except DilocoxError as error:
        if options.debug:
            _print_traceback()
        print(f"dilocox: {plain_lines(hide_secrets(str(error)))}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("dilocox: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of the output has closed the pipe, as `head` does in `dilocox ... | head`.
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        if options.debug:
            _print_traceback()
        text = file_problem(error)
        if text is None:
            text = f"unexpected {type(error).__name__}: {error}; --debug shows where"
        print(f"dilocox: {plain(hide_secrets(' '.join(text.split())))}", file=sys.stderr)
        sys.exit(1)


def _print_traceback() -> None:
    print(hide_secrets(traceback.format_exc()), end="", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks")
    parser = argparse.ArgumentParser(
        prog="dilocox",
        description="Train one language model on GPUs in several places, over ordinary links.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dilocox {__version__}")
    commands: Any = parser.add_subparsers(
        title="commands", metavar="COMMAND", parser_class=lab_command.Parser
    )

    run_file = argparse.ArgumentParser(add_help=False)
    run_file.add_argument("run", metavar="RUN.toml", type=Path, help="run file")
    run_file.add_argument(
        "--set",
        dest="overrides",
        metavar="section.key=value",
        action="append",
        default=[],
        help="override a key of the run file; may be given several times",
    )

    _add_train(commands, common, run_file)
    _add_coordinator(commands, common, run_file)
    _add_join(commands, common)
    _add_leave(commands, common)
    _add_handover(commands, common)
    planning = commands.add_parser("plan", parents=[common], help=plan.HELP)
    plan.add_arguments(planning)
    _add_data(commands, common, run_file)
    exporting = commands.add_parser("export", parents=[common], help=export.HELP)
    export.add_arguments(exporting)
    verifying = commands.add_parser("verify", parents=[common], help=verify.HELP)
    verify.add_arguments(verifying)

    asking = commands.add_parser("status", parents=[common], help=status.HELP)
    status.add_arguments(asking)
    reporting = commands.add_parser("report", parents=[common], help=report.HELP)
    report.add_arguments(reporting)
    publishing = commands.add_parser("publish", parents=[common], help=publish.HELP)
    publish.add_arguments(publishing)
    dispersed = commands.add_parser("availability", parents=[common], help=availability.HELP)
    availability.add_arguments(dispersed)
    auditing = commands.add_parser("audit", parents=[common], help=audit.HELP)
    audit.add_arguments(auditing)
    auditor = commands.add_parser("auditor", parents=[common], help=audit.AUDITOR_HELP)
    audit.add_auditor_arguments(auditor)
    sampling = commands.add_parser("generate", parents=[common], help=generate.HELP)
    generate.add_arguments(sampling)
    serving = commands.add_parser("serve", parents=[common], help=serve.HELP)
    serve.add_arguments(serving)
    evaluating = commands.add_parser("evaluate", parents=[common], help=evaluate.HELP)
    evaluate.add_arguments(evaluating)
    attesting = commands.add_parser("attest", parents=[common], help=attest.HELP)
    attest.add_arguments(attesting)
    settling = commands.add_parser("chain", help=chain.HELP)
    chain.add_arguments(settling, common)
    witnessing = commands.add_parser("witness", help=witness.HELP)
    witness.add_arguments(witnessing, common)
    lab_command.add_to(commands, common, run_file)
    return parser


def _add_train(
    commands: Any, common: argparse.ArgumentParser, run_file: argparse.ArgumentParser
) -> None:
    train = commands.add_parser(
        "train", parents=[common, run_file], help="train a run with all its sites on this machine"
    )
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    train.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an earlier run in the same folder; its token files are kept if they fit",
    )
    _add_trace(train, "trace.json")
    train.set_defaults(call=_train)


def _add_coordinator(
    commands: Any, common: argparse.ArgumentParser, run_file: argparse.ArgumentParser
) -> None:
    coordinator = commands.add_parser(
        "coordinator",
        parents=[common, run_file],
        help="start the coordinator of a run over a real network",
    )
    coordinator.add_argument("--resume", action="store_true", help="go on with a stopped run")
    coordinator.add_argument(
        "--wait-for",
        type=int,
        metavar="N",
        help="start training when N sites have joined (default: all sites of the run file)",
    )
    coordinator.add_argument("--verbose", action="store_true", help="also print all time-outs")
    coordinator.add_argument(
        "--standby-of", metavar="HOST:PORT",
        help="follow the coordinator at this address, to take over later",
    )  # fmt: skip
    coordinator.add_argument(
        "--take-over", action="store_true", help="make a standby's folder that of the coordinator"
    )
    coordinator.add_argument(
        "--gone", action="store_true",
        help="with --take-over: you have made sure that the first coordinator has ended",
    )  # fmt: skip
    coordinator.set_defaults(call=_coordinator)


def _add_join(commands: Any, common: argparse.ArgumentParser) -> None:
    join = commands.add_parser("join", parents=[common], help="join a run as one site")
    join.add_argument(
        "address", metavar="HOST:PORT",
        help="the coordinator's address; with a standby HOST:PORT,HOST:PORT",
    )  # fmt: skip
    join.add_argument("--site", required=True, help="name of this site in the run file")
    join.add_argument(
        "--run-file", required=True, type=Path, metavar="RUN.toml", help="the run file"
    )
    join.add_argument(
        "--token-file", type=Path, metavar="FILE",
        help="file with the site's join token, a copy of RUN_FOLDER/coordinator/tokens/SITE "
        "(default: the environment variable DILOCOX_TOKEN, else a prompt)",
    )  # fmt: skip
    join.add_argument(
        "--set", dest="overrides", metavar="section.key=value", action="append", default=[],
        help="override a key of the run file",
    )  # fmt: skip
    join.add_argument(
        "--key-file", type=Path, metavar="FILE",
        help="file in which the site keeps its key; it is created if it does not exist. Useful if "
        "the run folder does not last (default: RUN_FOLDER/private/SITE.key)",
    )  # fmt: skip
    join.add_argument(
        "--terms", metavar="FILE|URL",
        help="refuse to join unless the run file is that of these terms (docs/terms.md)",
    )  # fmt: skip
    join.add_argument(
        "--wallet", type=Path, metavar="KEYFILE",
        help="with --terms: file of the key of the site's account, which stakes and enrols "
        "before the site joins, if that is not done; made by dilocox chain key",
    )  # fmt: skip
    join.add_argument(
        "--password-file", type=Path, metavar="FILE",
        help="with --wallet: file of mode 600 whose first line is the key's password (default: a "
        "prompt)",
    )  # fmt: skip
    join.add_argument(
        "--chain", type=Path, metavar="FILE",
        help="with --wallet: the sponsor's chain.json (default: RUN_FOLDER/settlement/chain.json)",
    )  # fmt: skip
    _add_trace(join, "trace-SITE.json")
    join.set_defaults(call=_join)


def _add_leave(commands: Any, common: argparse.ArgumentParser) -> None:
    leave = commands.add_parser(
        "leave", parents=[common], help="let a site finish its round and leave the run"
    )
    leave.add_argument(
        "run_folder", type=Path, metavar="RUN_FOLDER", help="the coordinator's run folder"
    )
    leave.add_argument("--site", required=True, help="name of the site")
    kinds = leave.add_mutually_exclusive_group()
    kinds.add_argument(
        "--now",
        action="store_true",
        help="leave at once: the other sites take over the rest of its round",
    )
    kinds.add_argument(
        "--ban", dest="change", action="store_const", const="ban",
        help="remove the site at once and for good: its join token becomes void, and no one can "
        "join under its name",
    )  # fmt: skip
    kinds.add_argument(
        "--unban", dest="change", action="store_const", const="unban",
        help="lift a ban: the site may join again with a new token, which is written to "
        "coordinator/tokens",
    )  # fmt: skip
    kinds.add_argument(
        "--forget-key", dest="change", action="store_const", const="forget-key",
        help="let the site join once with another key, if it has lost its own",
    )  # fmt: skip
    leave.set_defaults(call=_leave)


def _add_handover(commands: Any, common: argparse.ArgumentParser) -> None:
    handing = commands.add_parser(
        "handover",
        parents=[common],
        help="write a checkpoint from which a run with other sites, stages or shards can start",
    )
    handing.add_argument("run_folder", type=Path, metavar="RUN_FOLDER")
    handing.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    handing.add_argument(
        "--checkpoint",
        type=int,
        metavar="SLOT",
        help="use checkpoints/tick-SLOT (default: the newest checkpoint)",
    )
    handing.set_defaults(call=_hand_over)


def _add_data(
    commands: Any, common: argparse.ArgumentParser, run_file: argparse.ArgumentParser
) -> None:
    data = commands.add_parser("data", help="prepare and show token files")
    actions = data.add_subparsers(metavar="ACTION", required=True)
    prepare = actions.add_parser(
        "prepare",
        parents=[common, run_file],
        help="write the token files for the text that [data] names",
    )
    prepare.set_defaults(call=_data_prepare)
    show = actions.add_parser(
        "show",
        parents=[common],
        help="show what token files hold, or which documents a run's model has seen",
    )
    show.add_argument("folder", type=Path, help="token files, or a run's folder")
    at = show.add_mutually_exclusive_group()
    at.add_argument(
        "--round",
        type=int,
        metavar="N",
        help="with a run's folder: documents seen in its first N rounds",
    )
    at.add_argument(
        "--checkpoint", type=int, metavar="SLOT",
        help="with a run's folder: documents seen up to checkpoints/tick-SLOT",
    )  # fmt: skip
    show.add_argument(
        "--data", type=Path, metavar="FOLDER", help="with a run's folder: the run's token files"
    )
    show.add_argument(
        "--json", action="store_true", help="with a run's folder: print every document as JSON"
    )
    show.add_argument(
        "--example", type=int, metavar="N",
        help="with token files: print document N, from 0, with marks around what is learned",
    )  # fmt: skip
    show.add_argument(
        "--verify", action="store_true", help="with token files: check every file by its digest"
    )
    show.set_defaults(call=_data_show)


def _add_trace(command: argparse.ArgumentParser, name: str) -> None:
    command.add_argument(
        "--trace",
        action="store_true",
        help=f"write a timeline of every rank to {name} in the run folder (a Chrome trace, for "
        "ui.perfetto.dev or chrome://tracing)",
    )


def _train(options: argparse.Namespace) -> int:
    from dilocox.api import load_run, train

    result = train(
        load_run(options.run, options.overrides),
        resume=options.resume,
        overwrite=options.overwrite,
        debug=options.debug,
        trace=options.trace,
    )
    return 0 if result.finished else 130 if result.stopped else 1


def _coordinator(options: argparse.Namespace) -> int:
    from dilocox.config.run_config import load_run

    config = load_run(options.run, options.overrides)
    if options.gone and not options.take_over:
        raise ConfigError("--gone: is for --take-over; add it, or leave --gone out")
    if options.standby_of is not None:
        if options.take_over or options.resume or options.wait_for is not None:
            raise ConfigError(
                "--standby-of follows a coordinator: --take-over, --resume and --wait-for are for "
                "one that serves"
            )
        from dilocox.training.launch.standby import follow

        return follow(config, options.standby_of, lambda line: print(plain(line), flush=True))
    from dilocox.training.launch.coordinator_process import coordinate

    return coordinate(
        config,
        run_file=options.run,
        overrides=options.overrides,
        wait_for=options.wait_for,
        resume=options.resume,
        verbose=options.verbose,
        take_over=options.take_over,
        gone=options.gone,
    )


def _join(options: argparse.Namespace) -> int:
    from dilocox.config.run_config import load_run
    from dilocox.coordinator.client.endpoint import Endpoint
    from dilocox.training.launch.join_token import read_token

    config, token = load_run(options.run_file, options.overrides), read_token(options.token_file)
    deposit = terms.deposit_by_terms(options, config)
    # This import takes seconds, so errors in the files are reported before it.
    from dilocox.training.launch.local import join

    return join(
        config,
        site=options.site,
        endpoint=Endpoint.at(options.address, options.site, token, options.key_file),
        debug=options.debug,
        trace=options.trace,
        deposit=deposit,
    )


def _leave(options: argparse.Namespace) -> int:
    from dilocox.training.launch.coordinator_process import leave

    print(leave(options.run_folder, options.site, options.now, options.change))
    return 0


def _hand_over(options: argparse.Namespace) -> int:
    from dilocox.training.portable_checkpoint_export import describe, hand_over

    made = hand_over(options.run_folder, options.to, options.checkpoint)
    print("\n".join(describe(made, options.to)))
    return 0


def _data_prepare(options: argparse.Namespace) -> int:
    from dilocox.config.run_config import load_run
    from dilocox.data import show
    from dilocox.training.launch.data_preparation import prepare_data
    from dilocox.training.launch.tokenizer_check import check_tokenizer

    config = load_run(options.run, options.overrides)
    check_tokenizer(config)
    print(show(prepare_data(config), config.data.rows))
    return 0


def _data_show(options: argparse.Namespace) -> int:
    from dilocox.data import TokenFiles, show

    if (options.folder / "run.toml").is_file():
        return _data_seen(options)
    if options.round is not None or options.checkpoint is not None or options.json:
        raise ConfigError(
            f"{options.folder}: holds token files; --round, --checkpoint and --json are for a "
            "run's folder"
        )
    files = TokenFiles.open(options.folder)
    if options.verify:
        files.verify()
    if options.example is not None:
        from dilocox.data.example import example

        print(plain_lines(example(files, options.example)))
        return 0
    print(show(files))
    return 0


def _data_seen(options: argparse.Namespace) -> int:
    from dilocox.record.verify.consumed_data import command

    if options.verify or options.example is not None:
        raise ConfigError(
            f"{options.folder}: is a run's folder; --verify and --example are for a folder of "
            "token files"
        )
    print(command(options.folder, options.round, options.checkpoint, options.data, options.json))
    return 0
