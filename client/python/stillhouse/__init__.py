"""Client of a Stillhouse server: lasting memories of documents for language models."""

from stillhouse import messages as v1
from stillhouse.client import Client, Error

__all__ = ["Client", "Error", "v1"]
