"""A message averaged among those who have come to a round, on a network where replicas come and go."""

from __future__ import annotations

from dataclasses import replace

from farflung.networks import ElasticNetwork, Party, PeerLostError
from farflung.outer.averaging import Averaging, Meeting
from farflung.outer.columns import Message, of_party
from farflung.outer.exchange import not_compared, start_columns
from farflung.outer.outcomes import Outcome, Result


def average_of_party(
    network: ElasticNetwork, party: Party, message: Message, meeting: Meeting, averaging: Averaging, deadline_s: float
) -> Result:
    """What the exchange comes to, for which this waits; with the own message where somebody is lost.

    Of the meeting, the party says who averages, and how much each message weighs.
    """
    columns = of_party(network, party, message.names)
    held = replace(meeting, group=party.group, weights=party.weights)
    meetings = [replace(held, network=column.network, key=column.key(held.key)) for column in columns]
    pending, error = start_columns(message, party.group, columns, meetings, not_compared, averaging, network.now)
    try:
        result = pending.wait(deadline_s)
    except PeerLostError as lost:
        result = Result(message.flat, party.group, Outcome.PEER_LOST, str(lost), missing=lost.ranks)
    result.compression_error = error
    return result
