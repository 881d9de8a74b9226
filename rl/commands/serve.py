"""`python -m rl.serve`: train and sample a policy over HTTP, with the client `tinker` of PyPI.

    python -m rl.serve --policy policies/tiny
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python your_loop.py

Clients train low-rank adapters of the policy (`Policy.lora_rank` at most, by default 32) and sample
from them. Clients of OpenAI's API sample too, at http://127.0.0.1:8000/v1, and trainers post token
ids to http://127.0.0.1:8000/inference/v1/generate. Checkpoints and records are in --folder, and a
restarted server loads them. Settings are fields of a training configuration: sizes of prompts,
responses and batches, and the mesh.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reprise.models.hints import install_hint
from reprise.rl.gin.command_line import config_parser, parse_command_line
from reprise.rl.gin.loader import ConfigError
from reprise.rl.runtime import devices
from reprise.rl.runtime.exit_codes import EXIT_USAGE
from reprise.rl.runtime.progress import say
from reprise.rl.runtime.run_files import resolve_path
from reprise.rl.settings.config import TrainConfig

KEY = "REPRISE_API_KEY"
RANK = "Policy.lora_rank=32"
BUDGET = 'Speculation.budget="goodput"'
NODES = "Engine.max_round_nodes=64"  # on CPUs, where more nodes take longer in proportion
TARGETS = "Policy.lora_targets=('attention', 'mlp', 'head')"


def main(argv: Sequence[str]) -> int:
    """Parse, check, load, serve until a signal; return the exit code."""
    parser = config_parser("serve", __doc__)
    parser.add_argument("--policy", required=True, metavar="DIR", help="a Hugging Face folder")
    parser.add_argument("--name", help="the model's name for clients (default: --policy as given)")
    parser.add_argument(
        "--tokenizer", help="the folder or name that clients load it from (default: --policy)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000")
    parser.add_argument("--folder", default="runs/server", help="default: runs/server")
    parser.add_argument(
        "--adapters", type=int, default=2, help="how many share rounds of samples (default: 2)"
    )
    args, overrides = parse_command_line(parser, argv, TrainConfig)
    with contextlib.ExitStack() as stack:
        try:
            _check(args)
            sock = stack.enter_context(_bind(args.host, args.port))
            app = _open(args, overrides)
        except (ConfigError, ValueError, OSError, ImportError) as error:
            say(f"error: {error}", sys.stderr)
            return EXIT_USAGE
        if warning := devices.warning():
            say(f"warning: {warning}", sys.stderr)
        return _serve(app, sock, args)


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for invalid arguments, before anything is loaded."""
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port: expected 0 to 65535, got {args.port}")
    if not 1 <= args.adapters <= 64:
        raise ValueError(f"--adapters: expected 1 to 64, got {args.adapters}")
    if not _is_loopback(args.host) and not os.environ.get(KEY):
        raise ValueError(
            f"--host={args.host}: others could reach the server: set {KEY} in its environment, "
            "and the same key as TINKER_API_KEY (it starts with 'tml-') at its clients"
        )


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the port; clients are refused until the server listens."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(
            f"{host}, port {port}: {error.strerror}: choose another --host or --port"
        ) from error
    return sock


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _hosts(host: str) -> tuple[str, ...] | None:
    """Return the host names that clients may use; None allows any, since clients have a key."""
    if not _is_loopback(host):
        return None
    return tuple(dict.fromkeys(["localhost", "127.0.0.1", "::1", host.lower()]))


def _open(args: argparse.Namespace, overrides: Sequence[str]) -> Any:
    """Load the policy and return the application that serves it."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
        from google import protobuf  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{error}: {install_hint('serve')}") from error
    from reprise.rl.endpoint.routes import ROUTES
    from reprise.rl.python.api import Policy
    from reprise.rl.server.app import make_app
    from reprise.rl.server.records import Records
    from reprise.rl.server.service import Served
    from reprise.rl.settings.unused import refuse_run_settings

    own = (RANK, TARGETS, BUDGET, *((NODES,) if devices.has_cpus_alone() else ()))
    settings = overrides if args.gin_file else (*own, *overrides)
    refuse_run_settings(settings, is_served=True)
    policy = Policy(args.policy, *settings, files=args.gin_file)
    if policy.model.lora is None:
        raise ValueError("Policy.lora_rank=0: expected at least 1: clients train adapters")
    tokenizer = args.tokenizer or str(resolve_path(args.policy).absolute())
    served = Served(policy, args.name or args.policy, tokenizer)
    records = Records(Path(args.folder))
    stream = policy.stream(args.adapters, say)
    key = os.environ.get(KEY)
    hosts = _hosts(args.host)
    return make_app(served, stream, records, key, hosts, more=[ROUTES], warms_up=True)


def _serve(app: Any, sock: socket.socket, args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; the running operation is finished first."""
    import uvicorn

    from reprise.rl.http.connections import configured

    server = uvicorn.Server(configured(app, host=args.host, port=args.port))
    host, port = sock.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    say(f"serving {args.name or args.policy} at http://{host}:{port}; checkpoints in {args.folder}")
    say(f"clients: TINKER_BASE_URL=http://{host}:{port} TINKER_API_KEY=tml-…")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn re-raises the signal once it has stopped
    server.run(sockets=[sock])
    say("stopped: checkpoints stay; models in training do not")
    return 0
