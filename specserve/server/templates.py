"""Renders chat templates in processes of their own."""

from collections.abc import Sequence
from typing import Any

import msgspec

from specserve.errors import Overloaded, RequestError
from specserve.models.chat_template import ChatOptions, ChatTemplate, Message
from specserve.server import template_process
from specserve.server.bounded_process import Refused
from specserve.server.processes import Ended, Processes

encode = msgspec.msgpack.Encoder().encode


def packed(value: Any, field: str) -> msgspec.Raw:
    try:
        return msgspec.Raw(encode(value))
    except (TypeError, ValueError, OverflowError) as e:
        raise RequestError(f"{field}: no valid text: {e}", field) from e


class TemplateProcesses(Processes):
    def __init__(self, template: ChatTemplate, seconds: float) -> None:
        super().__init__(template_process.__name__, encode(template), seconds, "chat template")

    async def render(
        self,
        messages: Sequence[Message],
        options: ChatOptions = ChatOptions(),  # noqa: B008
    ) -> str:
        """The chat as text; RequestError if the template refuses it or exceeds the deadline."""
        payload = encode((packed(messages, "messages"), packed(options, "chat_template_kwargs")))
        try:
            reply = await self.ask(payload)
        except TimeoutError as e:
            raise RequestError(
                f"messages: the chat template ran for more than {self.seconds:g} s: send fewer",
                "messages",
            ) from e
        except Ended as e:
            raise Overloaded("the process of the chat template ended: ask again") from e
        if isinstance(reply, Refused):
            raise RequestError(reply.message, reply.param or "messages")
        return reply.text
