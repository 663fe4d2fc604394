"""SaslHandshake and SaslAuthenticate; see ``security/authentication.py``."""

from __future__ import annotations

from millstream.broker.call import Call
from millstream.broker.node import BrokerNode
from millstream.broker.protocol.error_codes import ApiError, ErrorCode
from millstream.broker.protocol.wire import Message
from millstream.broker.security.authentication import MECHANISM


async def sasl_handshake(node: BrokerNode, call: Call) -> Message:  # noqa: ARG001 - a handler
    """Handle a SaslHandshake request."""
    if call.login is None:  # there are no users: Kafka's error where it requires no authentication
        return {"error_code": ErrorCode.ILLEGAL_SASL_STATE}
    code = call.login.handshake(call.request["mechanism"], call.version)
    return {"error_code": code, "mechanisms": [MECHANISM]}


async def sasl_authenticate(node: BrokerNode, call: Call) -> Message:  # noqa: ARG001 - a handler
    """Handle a SaslAuthenticate request."""
    if call.login is None:
        return {
            "error_code": ErrorCode.ILLEGAL_SASL_STATE,
            "error_message": "this broker has no users and requires no password",
        }
    try:
        await call.login.authenticate(call.request["auth_bytes"])
    except ApiError as error:
        return {"error_code": error.code, "error_message": str(error)}
    return {"error_code": ErrorCode.NONE}
