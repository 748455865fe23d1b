"""`python -m services.relay`."""

from pdd.config import StageSettings
from pdd.process import run
from pdd.types import Role
from services.relay.wiring import serve

if __name__ == "__main__":
    run(StageSettings, Role.RELAY, serve)
