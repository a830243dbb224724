"""The `kvferry` command line: its arguments, and what each command does with them."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path

from deploy import paths
from deploy.config import Configuration, resolve, show
from deploy.errors import EXIT_OK, MeasurementFailed, Refused
from deploy.output import private_copy
from deploy.reporting import Pipe, Progress, Terminal
from deploy.settings import DEFAULT_MODEL

FLAGS = {
    "--cluster": ("cluster", "NAME", "name of the cluster"),
    "--model": ("model", "PATH|NAME", "a local Hugging Face folder or a known name"),
    "--prefill": ("prefill.count", "N", "prefill workers"),
    "--decode": ("decode.count", "N", "decode workers"),
    "--gateways": ("gateway.count", "N", "gateways, on consecutive ports"),
    "--host": ("gateway.host", "H", "address that the gateways listen on"),
    "--port": ("gateway.port", "P", "port of the first gateway"),
    "--address": ("ray.address", "auto|ADDR", "join this Ray cluster instead of starting a local Ray"),
}
"""The short flags: the key that each stands for, the name of its value, what it is."""


class _Setting(argparse.Action):
    """Collects (key, text, source) in the order given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        text = str(values)
        if option_string in FLAGS:
            entry = (FLAGS[option_string][0], text, option_string)
        else:
            key, equals, value = text.partition("=")
            if not equals:
                raise argparse.ArgumentError(self, f"{text!r} is not key=value")
            entry = (key.strip(), value, "--set")
        namespace.flags = [*namespace.flags, entry]


class _Version(argparse.Action):
    """Prints the version, which is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"kvferry {importlib.metadata.version('kvferry')}")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(
        prog="kvferry", description="Serve language models with prefill and decode on separate workers."
    )
    root.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = root.add_subparsers(metavar="COMMAND", required=True)

    up = commands.add_parser("up", help="start a cluster and stay with it until Ctrl-C")
    _add_settings(up, list(FLAGS))
    up.add_argument("--detach", action="store_true", help="return when the cluster is ready, and leave it running")
    up.add_argument("--report-fd", type=int, help=argparse.SUPPRESS)
    up.set_defaults(run=_up)

    down = commands.add_parser("down", help="stop a cluster; returns when everything of it is gone")
    _add_settings(down, ["--cluster"])
    down.set_defaults(run=_down)

    status = commands.add_parser("status", help="how a cluster's gateways and workers are")
    _add_settings(status, ["--cluster"])
    status.add_argument("--json", action="store_true", help="for scripts")
    status.set_defaults(run=_status)

    config = commands.add_parser("config", help="the configuration").add_subparsers(metavar="COMMAND", required=True)
    show = config.add_parser("show", help="print the resolved configuration and where each value comes from")
    _add_settings(show, list(FLAGS))
    show.set_defaults(run=_config_show)

    model = commands.add_parser("model", help="the models known by name").add_subparsers(
        metavar="COMMAND", required=True
    )
    fetch = model.add_parser("fetch", help="download and convert a model into the cache; prints its folder")
    fetch.add_argument("name", nargs="?", help="a known name; the default model if left out")
    fetch.set_defaults(run=_model_fetch)

    bench = commands.add_parser("bench", help="measurements").add_subparsers(metavar="COMMAND", required=True)
    transfer = bench.add_parser("transfer", help="moving pages between two processes, next to other libraries")
    transfer.add_argument("--rounds", type=int, metavar="N", help="operations of each contender in a cell, at most")
    transfer.add_argument("--quick", action="store_true", help="a few small cells and rounds: does it run at all?")
    transfer.add_argument("--full", action="store_true", help="the largest cells too, which need 8 GiB of memory")
    transfer.add_argument("--transports", metavar="A,B", help="only these contenders")
    transfer.add_argument("--json", type=Path, metavar="FILE", help="write all results to a file")
    transfer.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as .png or .svg")
    transfer.add_argument("--seed", type=int, default=0, metavar="S", help="of the order and the pages drawn")
    transfer.set_defaults(run=_bench_transfer)
    engine = bench.add_parser("engine", help="a step of the engine, next to what the machine allows")
    engine.add_argument("--model", metavar="PATH|NAME", default=DEFAULT_MODEL, help="a folder or a known name")
    engine.add_argument("--context", type=int, default=512, metavar="N", help="tokens of each sequence")
    engine.add_argument("--chunk", type=int, default=512, metavar="N", help="tokens of a step of prefill")
    engine.add_argument("--rounds", type=int, metavar="N", help="how often everything is measured in turn")
    engine.add_argument("--threads", type=int, default=1, metavar="N", help="compute threads")
    engine.add_argument("--quick", action="store_true", help="one round, small batches: does it run at all?")
    engine.add_argument("--json", type=Path, metavar="FILE", help="write all results to a file")
    engine.add_argument("--seed", type=int, default=0, metavar="S", help="of the tokens")
    engine.set_defaults(run=_bench_engine)
    return root


def _add_settings(command: argparse.ArgumentParser, flags: list[str]) -> None:
    command.set_defaults(flags=[])
    command.add_argument("-f", "--file", type=Path, metavar="FILE", help="YAML configuration file")
    for flag in flags:
        _, metavar, text = FLAGS[flag]
        command.add_argument(flag, action=_Setting, dest=flag, default=argparse.SUPPRESS, metavar=metavar, help=text)
    command.add_argument(
        "--set",
        action=_Setting,
        dest="--set",
        default=argparse.SUPPRESS,
        metavar="KEY=VALUE",
        help="any setting, e.g. connector.transport=ucx; may be repeated",
    )


def _settings(options: argparse.Namespace) -> Configuration:
    return resolve(options.file, os.environ, options.flags)


def _up(options: argparse.Namespace, arguments: list[str]) -> int:
    settings = _settings(options).settings
    if options.detach:
        from deploy.detach import up_detached

        return up_detached(settings, [argument for argument in arguments if argument != "--detach"])
    from deploy.owner import Owner

    if options.report_fd is not None:
        return Owner(settings, Pipe(options.report_fd)).run()
    return Owner(settings, Terminal(private_copy(sys.stdout), private_copy(sys.stderr))).run()


def _down(options: argparse.Namespace, _arguments: list[str]) -> int:
    from deploy.down import down

    return down(_settings(options).settings.cluster)


def _status(options: argparse.Namespace, _arguments: list[str]) -> int:
    from deploy.status import as_json, as_text, cluster_report

    report = asyncio.run(cluster_report(_settings(options).settings.cluster))
    print(as_json(report) if options.json else as_text(report))
    return EXIT_OK


def _config_show(options: argparse.Namespace, _arguments: list[str]) -> int:
    print(show(_settings(options)))
    return EXIT_OK


def _model_fetch(options: argparse.Namespace, _arguments: list[str]) -> int:
    from deploy.model.catalog import known_model
    from deploy.model.store import ModelStore

    model = known_model(options.name or DEFAULT_MODEL)
    terminal = Terminal(sys.stdout, sys.stderr)
    store = ModelStore(paths.models_dir())
    try:
        folder = asyncio.run(store.ensure(model, lambda phase: terminal.report(Progress("model", phase)), hashes=True))
    finally:
        terminal.finish()
    print(folder)
    return EXIT_OK


def _bench_transfer(options: argparse.Namespace, _arguments: list[str]) -> int:
    from bench.transfer.run import Options, run_transfer

    asked = Options(
        rounds=options.rounds,
        quick=options.quick,
        full=options.full,
        transports=options.transports,
        json=options.json,
        plot=options.plot,
        seed=options.seed,
    )
    return _measure(lambda: run_transfer(asked))


def _bench_engine(options: argparse.Namespace, _arguments: list[str]) -> int:
    from bench.engine.run import Options, run_engine
    from deploy.model.resolve import resolve_model
    from deploy.model.store import ModelStore

    terminal = Terminal(sys.stdout, sys.stderr)
    store = ModelStore(paths.models_dir())
    try:
        model = asyncio.run(
            resolve_model(options.model, "", store, lambda phase: terminal.report(Progress("model", phase)))
        )
    finally:
        terminal.finish()
    asked = Options(
        model=model.path,
        context=options.context,
        chunk=options.chunk,
        rounds=options.rounds,
        quick=options.quick,
        threads=options.threads,
        json=options.json,
        seed=options.seed,
    )
    return _measure(lambda: run_engine(asked))


def _measure(run: Callable[[], object]) -> int:
    from bench.errors import BadRequest, BenchError

    try:
        run()
    except BadRequest as error:
        raise Refused(str(error)) from error
    except BenchError as error:
        raise MeasurementFailed(str(error)) from error
    return EXIT_OK
