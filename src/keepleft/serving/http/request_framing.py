"""HTTP/1.1 as h11 parses it, without what a proxy may read differently or what costs too much to parse."""

from __future__ import annotations

import h11

from keepleft.serving.http.errors import APIError
from keepleft.serving.http.limits import Limits


class StrictConnection(h11.Connection):
    """h11's connection, which also refuses ambiguous lengths and bodies in too many chunks.

    `rejection` is the response to what `next_event` raised.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(h11.SERVER, limits.headers - 1)  # as many without an end are too many already
        self.limits = limits
        self.num_chunks = 0  # of the current body
        self.is_chunked = False
        self.rejection: APIError | None = None

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        in_headers = self.their_state is h11.IDLE
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.rejection = self._to_api_error(error, in_headers)
            raise
        if isinstance(event, h11.Request):
            self.num_chunks = 0
            self._check_length_headers(event)
        elif isinstance(event, h11.Data) and event.chunk_start:
            self.num_chunks += 1
            if self.num_chunks > self.limits.chunks:
                self._reject(
                    413,
                    f"the body has more than {self.limits.chunks:,} chunks: send larger ones",
                    "too_many_chunks",
                )
        return event

    def _check_length_headers(self, request: h11.Request) -> None:
        """A server behind a proxy that reads the length of a body differently can be made to take the end of
        one request for another (request smuggling)."""
        names = [name for name, _ in request.headers]
        self.is_chunked = b"transfer-encoding" in names
        if not self.is_chunked:
            return
        if b"content-length" in names:
            self._reject(
                400,
                "the request has Content-Length and Transfer-Encoding: send one of them",
                "ambiguous_length",
            )
        if request.http_version < b"1.1":
            self._reject(400, "Transfer-Encoding needs HTTP/1.1: send Content-Length", "ambiguous_length")

    def _reject(self, status: int, message: str, code: str) -> None:
        self.rejection = APIError(status, message, code=code)
        raise h11.RemoteProtocolError(message, error_status_hint=status)

    def _to_api_error(self, error: h11.RemoteProtocolError, in_headers: bool) -> APIError:
        if error.error_status_hint == 431 and in_headers:
            message = f"the headers have more than {self.limits.headers:,} bytes: send fewer or shorter ones"
            return APIError(431, message, code="headers_too_large")
        if error.error_status_hint == 501:
            message = "this server knows no Transfer-Encoding but chunked: use that, or Content-Length"
            return APIError(501, message, code="invalid_http")
        return APIError(400, "this is not HTTP/1.1: check what sent it", code="invalid_http")
