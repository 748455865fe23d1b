"""`python -m services.gateway`: OpenAI's API in front of the mesh."""

from pdd.config import GatewaySettings
from pdd.process import run
from pdd.types import Role
from services.gateway.wiring import serve

if __name__ == "__main__":
    run(GatewaySettings, Role.GATEWAY, serve)
