"""Webhooks: events posted to URLs. They are stored and checked here; deliveries are made elsewhere."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import UNSET, Meta, Struct, UnsetType, structs

from headrace.addresses import check_webhook_url
from headrace.commands._base import Command, Flag, Ok, Removal, Removed, Reply, command
from headrace.errors import InvalidCommand, NotFound
from headrace.model import Many, QueueName, ShortText, Webhook, optional

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer

WEBHOOK_EVENTS: Final = ("job.pushed", "job.started", "job.completed", "job.failed", "job.progress")
NOT_FOUND: Final = "Webhook not found"

# Its length is checked with the rest of the address, where the texts are.
WebhookUrl = Annotated[str, Meta(extra={"required": "Webhook URL is required"})]


def check_events(events: list[str]) -> None:
    unknown = [event for event in events if event not in WEBHOOK_EVENTS]
    if unknown:
        raise InvalidCommand(f"Invalid webhook event(s): {', '.join(unknown)}. Valid: {', '.join(WEBHOOK_EVENTS)}")


class WebhookAdded(Struct, rename="camel"):
    webhook_id: str
    url: str
    events: list[str]
    created_at: float
    queue: str | UnsetType = UNSET


class WebhookView(Struct, rename="camel"):
    """A webhook as it is shown: all but its secret."""

    id: str
    url: str
    events: list[str]
    created_at: float
    last_triggered: float | None
    success_count: int
    failure_count: int
    enabled: bool
    queue: str | UnsetType = UNSET
    dropped_count: int | UnsetType = UNSET
    last_error: str | UnsetType = UNSET


class WebhookStats(Struct):
    total: int
    enabled: int


class WebhooksData(Struct):
    webhooks: list[WebhookView]
    stats: WebhookStats


class Added(Reply):
    data: WebhookAdded


class WebhooksFound(Reply):
    data: WebhooksData


def webhook_view(webhook: Webhook) -> WebhookView:
    return WebhookView(
        id=webhook.id,
        url=webhook.url,
        events=webhook.events,
        created_at=float(webhook.created_at),
        last_triggered=None if webhook.last_triggered is None else float(webhook.last_triggered),
        success_count=webhook.success_count,
        failure_count=webhook.failure_count,
        enabled=webhook.enabled,
        queue=optional(webhook.queue),
        dropped_count=webhook.dropped_count or UNSET,
        last_error=optional(webhook.last_error),
    )


@command(
    Added,
    category="Webhooks",
    flags=Flag.WRITE,
    http="POST /webhooks fail=400",
    errors=(
        "Webhook URL is required",
        "Webhook URL too long (max 2048 characters)",
        "Invalid URL format",
        "Webhook URL must use http or https protocol",
        "Webhook URL must use https",
        "Webhook URL cannot point to <place>",
        "Invalid webhook event(s): <names>. Valid: " + ", ".join(WEBHOOK_EVENTS),
    ),
)
class AddWebhook(Command[Added], tag="AddWebhook"):
    """Post events of all queues, or of one, to a URL. With `secret` the deliveries are signed.

    Loopback and private addresses are refused, unless the server is configured to allow them. Deliveries start
    with the first event after the reply.
    """

    url: WebhookUrl
    events: Many[ShortText]
    queue: QueueName | None = None
    secret: ShortText | None = None

    async def run(self, engine: Engine, peer: Peer) -> Added:
        check_webhook_url(self.url, engine.webhook_rules)
        check_events(self.events)
        created_at = float(engine.clock.now_ms())
        webhook = Webhook(engine.ids.next(), self.url, self.events, self.queue, self.secret, created_at)
        await engine.backend.add_webhook(webhook)
        return Added(data=WebhookAdded(webhook.id, self.url, self.events, created_at, optional(self.queue)))


@command(
    Removed, category="Webhooks", flags=Flag.WRITE, http="DELETE /webhooks/{webhookId} fail=404", errors=(NOT_FOUND,)
)
class RemoveWebhook(Command[Removed], tag="RemoveWebhook"):
    """Remove a webhook."""

    webhook_id: ShortText

    async def run(self, engine: Engine, peer: Peer) -> Removed:
        if not await engine.backend.remove_webhook(self.webhook_id):
            raise NotFound(NOT_FOUND)
        return Removed(data=Removal(removed=True))


@command(WebhooksFound, category="Webhooks", http="GET /webhooks")
class ListWebhooks(Command[WebhooksFound], tag="ListWebhooks"):
    """All webhooks with the outcome of their deliveries; secrets are never shown."""

    async def run(self, engine: Engine, peer: Peer) -> WebhooksFound:
        webhooks = await engine.backend.webhooks()
        stats = WebhookStats(total=len(webhooks), enabled=sum(webhook.enabled for webhook in webhooks))
        return WebhooksFound(data=WebhooksData([webhook_view(webhook) for webhook in webhooks], stats))


@command(Ok, category="Webhooks", flags=Flag.WRITE, http="PUT /webhooks/{id}/enabled fail=400", errors=(NOT_FOUND,))
class SetWebhookEnabled(Command[Ok], tag="SetWebhookEnabled"):
    """Disable a webhook, or enable it again."""

    id: ShortText
    enabled: bool

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        if await engine.backend.change_webhook(self.id, partial(structs.replace, enabled=self.enabled)) is None:
            raise NotFound(NOT_FOUND)
        return Ok()
