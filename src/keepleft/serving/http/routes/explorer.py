"""The explorer page, and POST /explore/{question}"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response

from keepleft.serving.http.errors import APIError
from keepleft.serving.http.middleware.auth import APIKeys
from keepleft.serving.http.schemas.responses import ExplorerAnswer, response_docs
from keepleft.serving.http.service import Service
from keepleft.serving.http.sse import until_disconnect
from keepleft.serving.http.validated_route import validated_route

MEDIA_TYPES = {"index.html": "text/html", "explorer.js": "text/javascript", "explorer.css": "text/css"}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# tells the operator's page, and no other, where to ask what the server is doing
OPERATOR_ATTRIBUTE = ('data-api-url="./"', 'data-api-url="./" data-status-url="server"')
PAGE_HEADERS = {"content-security-policy": CONTENT_SECURITY_POLICY, "cache-control": "no-cache"}


def routes(service: Service, keys: APIKeys) -> APIRouter:
    router = APIRouter(route_class=validated_route(service))

    @router.head("/", include_in_schema=False)
    @router.get("/", include_in_schema=False)
    async def home() -> Response:
        return RedirectResponse("explore/", 307)

    @router.get("/explore/", include_in_schema=False)
    async def page(request: Request) -> Response:
        response = _file_response(service.page_folder, "index.html")
        if isinstance(response, FileResponse) and keys.is_operator(request.state.tenant):
            html = (service.page_folder / "index.html").read_text("utf-8")
            return HTMLResponse(html.replace(*OPERATOR_ATTRIBUTE, 1), headers=PAGE_HEADERS)
        return response

    @router.get("/explore/explorer.js", include_in_schema=False)
    async def script() -> Response:
        return _file_response(service.page_folder, "explorer.js")

    @router.get("/explore/explorer.css", include_in_schema=False)
    async def style() -> Response:
        return _file_response(service.page_folder, "explorer.css")

    @router.post(
        "/explore/{question}",
        tags=["keepleft"],
        summary="A question of the explorer page",
        **response_docs(ExplorerAnswer),
    )
    async def explore(request: Request, question: str, params: Annotated[dict[str, Any], Body()]) -> Response:
        if service.explorer is None:
            raise APIError(404, "this server has no explorer: it was started without one", code="no_explorer")
        tenant = request.state.tenant
        task_params = {"question": question, "params": params, "tenant": tenant}
        work = service.run_beside_engine("question", task_params, tenant)
        answer = await until_disconnect(request, service.limits, work)
        return Response(answer, media_type="application/json")

    return router


def _file_response(folder: Path, name: str) -> Response:
    """One of the three files of the page; the name never comes from a request."""
    if not (folder / name).is_file():
        return PlainTextResponse(
            "The page has not been built: `make page` builds it. The API works without it: /openapi.json "
            "lists its routes.\n",
            404,
        )
    return FileResponse(folder / name, media_type=MEDIA_TYPES[name], headers=PAGE_HEADERS)
