"""How a campaign says that something did not work: one line, with the remedy."""

from __future__ import annotations


class CampaignError(Exception):
    """A step, or the whole campaign, cannot be done. The message is one line."""


class NotPossibleError(CampaignError):
    """Something that this server or machine does not have: said, and no failure."""


class ServerGoneError(CampaignError):
    """The server does not answer, or no longer."""
