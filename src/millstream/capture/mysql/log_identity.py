"""Whether a server has the binary log that a capture has read: asked as a capture asks when it goes on.

MariaDB tells a server by nothing that stays, and a server of MySQL may have been restored from a backup. What tells a
log from others of its name is the second in which each of its files was made, and that an event ends at the place:

=======================================================  ==========================================
the file of the place                                    the server
=======================================================  ==========================================
is not there, or ends before the place                   lacks what was captured, or is another one
was made in another second                               is another one, or its log was made anew
has no event that ends at the place                      is another one
has one                                                  has what was captured
=======================================================  ==========================================
"""

from __future__ import annotations

import secrets

from millstream.capture.mysql.address import MariaDbAddress
from millstream.capture.mysql.decoder import BinlogDecoder
from millstream.capture.mysql.session import BinlogStream
from millstream.capture.mysql.snapshot import BinlogPosition
from millstream.capture.mysql.transactions import TransactionReader
from millstream.capture.units import Progress

_HEARTBEAT_S = 0.1  # of a place at the end of the log, behind which no event comes


def refuse_other_log(address: MariaDbAddress, progress: Progress) -> None:
    """Return if the server has the binary log that a capture with this progress has read, up to its place.

    Raises:
        ConflictError: it has not.
        RetriableError: it does not respond.
    """
    position = BinlogPosition.of(progress["file"], progress["position"])
    with BinlogStream(
        address,
        position.file,
        position.position,
        replica_id=(1 << 31) + secrets.randbelow(1 << 31),
        heartbeat_s=_HEARTBEAT_S,
    ) as stream:
        decoder = BinlogDecoder({}, lambda *_: False, checksum=stream.checksum)
        TransactionReader(decoder, stream.event, position, progress["created"]).open()
        stream.event()  # one behind the place, or a heartbeat; an error where none can be
