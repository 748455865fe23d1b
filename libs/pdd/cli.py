"""`pdd`: start a mesh on this machine, look at it, stop it. Every error is one line and exit status 1."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from pdd.errors import ConfigError, PddError
from pdd.local import demo as demonstration
from pdd.local import logs as log_files
from pdd.local import status_view
from pdd.local.background import ERROR_MARK, interrupt_on_sigterm, stay
from pdd.local.mesh import LocalMesh
from pdd.local.plan import PACES, MeshOptions
from pdd.local.state import RunState, StateDir, default_state_dir
from pdd.local.status import mesh_status
from pdd.local.supervisor import StartError, last_lines, stop_leftovers
from pdd.types import Pipeline

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

SUPERVISOR_DEADLINE_S = 60.0
LOG_LINES = 20


@contextlib.contextmanager
def _one_line_errors() -> Generator[None]:
    try:
        yield
    except PddError as error:
        for line in error.log_tail if isinstance(error, StartError) else ():
            errors.print(f"  {line}", style="dim", markup=False, soft_wrap=True)
        errors.print(f"pdd: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _say(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


@app.command()
def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the mesh is ready.")] = False,
    demo: Annotated[bool, typer.Option(help="Show one long request on a timeline once the mesh is ready.")] = True,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill instances, datacenter A.")] = 1,
    relay: Annotated[int, typer.Option(min=0, help="RelayDecode instances, datacenter A.")] = 1,
    main_decode: Annotated[int, typer.Option(min=0, help="MainDecode instances, datacenter B.")] = 1,
    local_main_decode: Annotated[int, typer.Option(min=0, help="MainDecode instances in A, for `pd-local`.")] = 1,
    pipeline: Annotated[Pipeline, typer.Option(help="Layout of requests that name none.")] = Pipeline.PDD,
    model: Annotated[
        Path | None, typer.Option(help="GGUF file or Hugging Face directory. Default: SmolLM2-135M-Instruct.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type of weights and KV: bfloat16 or float32.")] = "bfloat16",
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + output in tokens.")] = None,
    pool_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each stage's KV pool holds.")] = 16_384,
    wan_mbps: Annotated[float, typer.Option(help="Rate of the WAN in Mbit/s.")] = 100.0,
    wan_delay_ms: Annotated[float, typer.Option(help="One-way delay of the WAN.")] = 15.0,
    wan_jitter_ms: Annotated[float, typer.Option(help="Jitter of the WAN's delay (+-).")] = 1.0,
    fabric: Annotated[str, typer.Option(help="KV transport inside A: auto, nixl or stream.")] = "auto",
    pace: Annotated[str | None, typer.Option(help=f"Pace the stages like a chip: {', '.join(PACES)}.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the gateway; 0: any free one.")] = 8000,
    port_base: Annotated[int | None, typer.Option(help="First of the mesh's other ports. Default: free ones.")] = None,
) -> None:
    """Start everything: NATS, Valkey, the WAN, all stages, the gateway. Ctrl-C stops it all."""
    options = MeshOptions(
        prefill=prefill,
        relay=relay,
        main_decode=main_decode,
        local_main_decode=local_main_decode,
        model=model.resolve() if model is not None else None,
        dtype=dtype,
        pool_tokens=pool_tokens,
        max_model_len=max_model_len,
        wan_mbps=wan_mbps,
        wan_delay_ms=wan_delay_ms,
        wan_jitter_ms=wan_jitter_ms,
        pipeline=pipeline,
        pace=pace,
        fabric=fabric,
        gateway_port=port,
        port_base=port_base,
    )
    state = StateDir(default_state_dir())
    with _one_line_errors():
        if detach:
            _greet(_start_in_background(options, state), pipeline, demo=demo)
            return
        interrupt_on_sigterm()
        ready = False
        try:
            with LocalMesh(options, state.path, _say) as mesh:
                ready = True
                _greet(mesh.gateway_url, pipeline, demo=demo)
                _say("Ctrl-C stops everything.")
                stay(mesh, _say)
        except KeyboardInterrupt:
            _say("Stopped.")
            raise typer.Exit(0 if ready else 130) from None


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with all figures of each beat.")] = False,
) -> None:
    """Show the live instances and their load, the gateway's figures and the cache's."""
    with _one_line_errors():
        state = _running()
        now = mesh_status(state)
        if now is None:
            raise ConfigError(f"the gateway at {state.gateway_url} does not answer; see `pdd logs gateway`")
        if as_json:
            print(msgspec.json.encode(now).decode())
        else:
            status_view.show(console, now)


@app.command()
def demo(
    pipeline: Annotated[Pipeline, typer.Option(help="Layout the request goes through.")] = Pipeline.PDD,
) -> None:
    """Send one long prompt through the running mesh and show what happened when."""
    with _one_line_errors():
        _demonstrate(_running().gateway_url, pipeline)


@app.command()
def down() -> None:
    """Stop the running mesh."""
    state_dir = StateDir(default_state_dir())
    state = state_dir.read()
    supervisor = state.supervisor.find() if state is not None else None
    if supervisor is not None:
        supervisor.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired, TimeoutError):
            supervisor.wait(SUPERVISOR_DEADLINE_S)
    left = stop_leftovers(state.processes) if state is not None else []
    state_dir.clear()
    _say("Stopped." if supervisor is not None or left else "No mesh is running.")


@app.command()
def logs(
    service: Annotated[str | None, typer.Argument(help="A process, or the start of its name: `main_decode`.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is added.")] = False,
) -> None:
    """Show what the processes of the last mesh wrote."""
    with _one_line_errors(), contextlib.suppress(KeyboardInterrupt):
        files = log_files.choose(StateDir(default_state_dir()).logs, service)
        for name, line in log_files.tail(files, LOG_LINES):
            _say(f"{name}: {line}")
        if follow:
            for name, line in log_files.follow(files):
                _say(f"{name}: {line}")


def _running() -> RunState:
    state = StateDir(default_state_dir()).read()
    if state is None or state.supervisor.find() is None:
        raise ConfigError("no mesh is running; `pdd up` starts one")
    return state


def _start_in_background(options: MeshOptions, state: StateDir) -> str:
    """Start the supervisor in a session of its own, show its progress, return the gateway's URL once it is ready."""
    state.logs.mkdir(parents=True, exist_ok=True)
    log_path = state.logs / "supervisor.log"
    arguments = [msgspec.json.encode(options, enc_hook=str).decode(), str(state.path)]
    with log_path.open("wb") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-P", "-m", "pdd.local.background", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    shown = 0
    try:
        while True:
            ended = supervisor.poll() is not None
            lines = last_lines(log_path, 1000)
            for line in lines[shown:]:
                if not line.startswith(ERROR_MARK):
                    _say(line)
            shown = len(lines)
            if ended:
                last = lines[-1] if lines else "the supervisor ended without a word"
                raise StartError(last.removeprefix(ERROR_MARK))
            now = state.read()
            if now is not None and now.ready and now.supervisor.pid == supervisor.pid:
                return now.gateway_url
            time.sleep(0.2)
    except KeyboardInterrupt:
        supervisor.terminate()
        supervisor.wait()
        raise typer.Exit(130) from None


def _greet(gateway_url: str, pipeline: Pipeline, *, demo: bool) -> None:
    if demo:
        try:
            _demonstrate(gateway_url, pipeline)
        except PddError as error:  # the mesh is up all the same, and its logs say more
            errors.print(f"The demo failed: {error}", style="red", markup=False, soft_wrap=True)
    name = demonstration.model_name(gateway_url)
    _say(f"\nThe mesh is ready. OpenAI API: {gateway_url}/v1")
    _say(
        f"  curl {gateway_url}/v1/chat/completions -H 'content-type: application/json' "
        f"""-d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'"""
    )
    command = Path(sys.argv[0])
    pdd = command.name if shutil.which(command.name) else str(command)
    _say("  " + " | ".join(f"{pdd} {verb}" for verb in ("status", "demo", "logs -f", "down")))


def _demonstrate(gateway_url: str, pipeline: Pipeline) -> None:
    _say("\nSending one long prompt ...")
    demonstration.show(console, demonstration.ask_mesh(gateway_url, pipeline))


if __name__ == "__main__":
    app()
