"""`broker_url = "sidejob://host:6379/0"`: Celery's Redis broker, with messages that a killed worker does not lose.

For any app of Celery or kombu, with or without the rest of this package: importing this module makes the URLs known
(`sidejobs://` uses TLS, `sidejob-sentinel://` asks sentinels for the server). It announces each message that is
refused, recovered or buried.
"""

from kombu.transport import TRANSPORT_ALIASES

from .announcements import message_buried, message_refused, messages_recovered

# kombu reads no entry points, allows no name with a `+`, and forgets a class given as `broker_transport` when it
# switches to the next of several URLs. The names are resolved when a URL is used, so redis-py is not imported here.
TRANSPORT_ALIASES["sidejob"] = "celery_sidejob.transport.redis.transport:Transport"
TRANSPORT_ALIASES["sidejobs"] = "celery_sidejob.transport.redis.transport:TLSTransport"
TRANSPORT_ALIASES["sidejob-sentinel"] = "celery_sidejob.transport.redis.sentinel:SentinelTransport"
TRANSPORT_ALIASES["sidejobpg"] = "celery_sidejob.transport.postgres.transport:Transport"

__all__ = ["message_buried", "message_refused", "messages_recovered"]
