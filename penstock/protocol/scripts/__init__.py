"""The verbs of the protocol: one typed function per Lua file, for the sync and the async client alike.

A function here builds a ``Call`` (its keys, arguments and parser) without network access; ``run`` and
``run_async`` send it. Every verb may be sent again after a lost reply: it is idempotent, or its guard refuses the
second call (protocol of leases, tokens, owners and revisions).
"""

from penstock.protocol.scripts.leader import *  # noqa: F403
from penstock.protocol.scripts.operator import *  # noqa: F403
from penstock.protocol.scripts.orders import *  # noqa: F403
from penstock.protocol.scripts.producer import *  # noqa: F403
from penstock.protocol.scripts.recorder import *  # noqa: F403
from penstock.protocol.scripts.relay import *  # noqa: F403
from penstock.protocol.scripts.shared import *  # noqa: F403
from penstock.protocol.scripts.trainer import *  # noqa: F403
from penstock.protocol.scripts.weights import *  # noqa: F403
from penstock.protocol.scripts.worker import *  # noqa: F403
from penstock.redis.call import *  # noqa: F403
