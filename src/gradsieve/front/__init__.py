"""The former name of `gradsieve.integrations`, whose modules can also be imported from here."""

from gradsieve.integrations import __path__ as __path__
