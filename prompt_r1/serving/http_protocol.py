"""HTTP as uvicorn reads it, with JSON errors for other bytes."""

import json

from uvicorn.protocols.http.h11_impl import H11Protocol

from prompt_r1.serving.failures import BadRequest


class JsonErrors(H11Protocol):
    """Answers a malformed request as the server answers every other wrong one, not in plain text."""

    def send_400_response(self, msg: str) -> None:
        """Answer with `msg`, and close the connection."""
        body = json.dumps(BadRequest(msg).body).encode()
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
