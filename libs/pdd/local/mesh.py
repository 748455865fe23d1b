"""A whole mesh on this machine: checks first, then starts everything in order, and stops everything it started.

    with LocalMesh(MeshOptions(gateway_port=0), state_dir) as mesh:
        httpx.post(f"{mesh.gateway_url}/v1/chat/completions", json=...)

Whatever happens between the start and the end, no process is left behind. It serves nothing itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec
import psutil

from pdd.local import servers
from pdd.local.cores import Assignment
from pdd.local.footprint import read_config, stage_bytes
from pdd.local.instances import mesh_report
from pdd.local.plan import (
    MeshOptions,
    Ports,
    hand_out,
    placement,
    ports_needed,
    service_processes,
    shaper_process,
    stages,
)
from pdd.local.preflight import check_gateway_port, check_memory, check_model, free_ports
from pdd.local.shaper import ask
from pdd.local.state import RunState, StateDir
from pdd.local.supervisor import ProcessGroup, ProcessId, ProcessSpec, stop_leftovers
from pdd.model.source import ensure_default_model

SERVERS_DEADLINE_S = 30.0
READY_DEADLINE_S = 300.0
"""Loading weights four times over on a small machine takes its time."""


class LocalMesh:
    """Owns all processes of a mesh. `progress` is told, in lines fit for a user, what is being waited for."""

    def __init__(
        self, options: MeshOptions, state_dir: Path, progress: Callable[[str], None] = lambda line: None
    ) -> None:
        self._options = options
        self._state = StateDir(state_dir)
        self._progress = progress
        self._processes = ProcessGroup(self._state.logs)
        self._specs: dict[str, ProcessSpec] = {}
        self._cleanup = contextlib.ExitStack()
        self.gateway_url = ""
        self.shaper_control = 0
        """Port for `pdd.local.shaper.ask`."""
        self._cache_metrics = 0
        self.assignments: list[Assignment] = []

    def __enter__(self) -> LocalMesh:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and return when every instance is live.

        Raises `ConfigError` for what can be known to fail beforehand, `ModelError` if there is no model, `StartError`
        if a process does not come up. After any exception everything is stopped again.
        """
        self._options.check()
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._state.held())
            self._clear_leftovers()
            undo.callback(self._state.clear)
            undo.callback(self._stop_in_order)
            self._start()
            self._cleanup = undo.pop_all()

    def stop(self) -> None:
        """Stop everything that was started, in reverse order."""
        self._cleanup.close()

    def pid(self, name: str) -> int:
        """PID of a process by its name, for example `prefill-0` or `main_decode-b-0`."""
        return next(one.pid for one in self._processes.ids() if one.name == name)

    def kill(self, name: str) -> None:
        """End a process without warning (SIGKILL)."""
        self._processes.signal(name, signal.SIGKILL)
        self._processes.stop([name])
        self._save(ready=True)

    def restart(self, name: str) -> None:
        """Start a process again that has ended; it comes up with a new epoch. Does not wait for it."""
        self._processes.start(self._specs[name])
        self._save(ready=True)

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S) -> None:
        """Wait until the gateway sees every instance, as the process that runs now: of one that was restarted it may
        still see the predecessor. Raises `StartError`."""
        pids = {one.name: one.pid for one in self._processes.ids()}
        expected = {(stage.dc, stage.role.value, stage.instance): stage.name for stage in stages(self._options)}

        def waiting_for() -> str:
            report = mesh_report(self.gateway_url)
            if report is None:
                return "the gateway"
            seen = {(one.dc, one.role, one.instance): one.pid for one in report.instances}
            return ", ".join(name for place, name in expected.items() if seen.get(place) != pids.get(name))

        self._processes.wait_for(waiting_for, deadline_s)

    def wait_any(self, timeout_s: float) -> dict[str, int]:
        """Wait; return name and exit status of each process that ended meanwhile."""
        ended = self._processes.wait_any(timeout_s)
        if ended:
            self._save(ready=True)
        return ended

    def _start(self) -> None:
        options = self._options
        model = options.model if options.model is not None else ensure_default_model(self._progress)
        check_model(model)
        ports = hand_out(options, free_ports(ports_needed(options), options.port_base))
        check_gateway_port(ports.gateway)
        self.gateway_url = f"http://127.0.0.1:{ports.gateway}"
        self.shaper_control = ports.shaper_control
        self._cache_metrics = ports.cache_metrics

        self._launch_servers(ports)
        # Reading the model's header takes seconds: as long as the servers need to come up.
        config = read_config(model)
        needed = len(stages(options)) * stage_bytes(config, options.dtype, options.pool_tokens)
        check_memory(needed, psutil.virtual_memory().available)
        self._await_servers(ports)

        self.assignments = placement(options, sorted(os.sched_getaffinity(0)))
        for one in self.assignments:
            where = ",".join(map(str, one.cores))
            self._progress(f"  {one.name:<16} core {where}, {one.threads} thread{'s' * (one.threads > 1)}")
        if options.max_model_len is None and options.pool_tokens < config.context_length:
            options = msgspec.structs.replace(options, max_model_len=options.pool_tokens)
            self._progress(f"Prompt and answer may have {options.pool_tokens} tokens, as many as a KV pool holds")
        self._progress(f"Loading {model.stem} into {len(self.assignments)} stages")
        ucx_tls = os.environ.get("UCX_TLS", "tcp,self")
        for spec in service_processes(options, model, ports, self.assignments, ucx_tls):
            self._launch(spec)
        self.wait_ready()
        self._save(ready=True)

    def _launch_servers(self, ports: Ports) -> None:
        options = self._options
        self._progress(f"Starting NATS (one per datacenter), Valkey and the WAN ({_describe(options)})")
        run_dir = self._state.path / "servers"
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir()
        for spec in (
            servers.nats_server("a", run_dir, ports.nats_a, ports.nats_a_http, servers.leaf_listener(ports.leaf)),
            shaper_process(options, ports),
            servers.nats_server("b", run_dir, ports.nats_b, ports.nats_b_http, servers.leaf_remote(ports.leaf_wan)),
            servers.valkey_server(run_dir, ports.valkey),
        ):
            self._launch(spec)

    def _await_servers(self, ports: Ports) -> None:
        ready = {
            "nats-a": lambda: servers.nats_ready(ports.nats_a_http),
            "the WAN's self-test": lambda: servers.shaper_ready(ports.shaper_control),
            "nats-b": lambda: servers.nats_ready(ports.nats_b_http),
            "the leaf link": lambda: servers.leaf_ready(ports.nats_b_http),
            "valkey": lambda: servers.valkey_ready(ports.valkey),
        }
        self._processes.wait_for(
            lambda: ", ".join(name for name, is_ready in ready.items() if not is_ready()), SERVERS_DEADLINE_S
        )
        measured = ask(ports.shaper_control).self_test
        self._progress(f"WAN measured: {measured.mbps:g} Mbit/s, round trip {measured.round_trip_ms:g} ms")
        if fault := measured.fault(self._options.line):
            self._progress(f"Warning: {fault}")

    def _launch(self, spec: ProcessSpec) -> None:
        self._processes.log_path(spec.name).unlink(missing_ok=True)
        self._specs[spec.name] = spec
        self._processes.start(spec)
        self._save(ready=False)

    def _save(self, *, ready: bool) -> None:
        """Write down what runs, so that it can be stopped even if this process is killed."""
        me = ProcessId.of("supervisor", os.getpid())
        running = self._processes.ids()
        ended = sorted(self._specs.keys() - {one.name for one in running}) if ready else []
        self._state.write(
            RunState(me, running, self.gateway_url, self.shaper_control, ready, self._cache_metrics, ended)
        )

    def _clear_leftovers(self) -> None:
        state = self._state.read()
        if state is not None and (stopped := stop_leftovers(state.processes)):
            self._progress(f"Stopped what an earlier mesh had left behind: {', '.join(stopped)}")

    def _stop_in_order(self) -> None:
        """The gateway first, so that nothing new begins; then the other services; then what they stand on."""
        infrastructure = ["nats-b", "shaper", "nats-a", "valkey"]
        services = [name for name in self._specs if name not in infrastructure and name != "gateway"]
        with contextlib.ExitStack() as each:  # an interrupt during one must not spare the others
            for names in (infrastructure, services, ["gateway"]):
                each.callback(self._processes.stop, names)


def _describe(options: MeshOptions) -> str:
    return f"{options.wan_mbps:g} Mbit/s, {options.wan_delay_ms:g} ms one way, jitter {options.wan_jitter_ms:g} ms"
