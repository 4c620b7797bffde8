"""An answer that has been asked for, on its way back: as a stream or whole."""

from starlette.requests import Request
from starlette.responses import Response

from specserve.server.answer import Answer
from specserve.server.protocol import Body
from specserve.server.service import Service
from specserve.server.shape import Form, Shape
from specserve.server.sse import EventStream, whole


async def respond(request: Request, form: Form, asked: Body, answer: Answer) -> Response:
    service: Service = request.app.state.service
    shape = Shape(form, service.served, asked, answer)
    if asked.stream:
        return EventStream(answer, shape, service.limits.comment_seconds)
    return await whole(answer, shape, request.receive)
