"""The messages with which a client authenticates."""

from __future__ import annotations

from millstream.broker.protocol.schema import Api

SASL_HANDSHAKE = Api(
    17,
    "SaslHandshake",
    (0, 1),
    request="""
        mechanism             string
    """,
    response="""
        error_code            int16
        mechanisms            []string
    """,
)

SASL_AUTHENTICATE = Api(
    36,
    "SaslAuthenticate",
    (0, 2),
    flexible=2,
    request="""
        auth_bytes            bytes
    """,
    response="""
        error_code            int16
        error_message         string   0+ null 0+ = null
        auth_bytes            bytes
        session_lifetime_ms   int64    1+
    """,
)

SECURITY_APIS = (SASL_HANDSHAKE, SASL_AUTHENTICATE)
