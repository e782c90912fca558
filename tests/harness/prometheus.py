"""Reading Prometheus' text format, as far as Envoy writes it."""

from __future__ import annotations

import re

Key = tuple[str, frozenset[tuple[str, str]]]

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)\{([^}]*)\}\s+(\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse(text: str) -> dict[Key, float]:
    """Every sample, by its name and its labels."""
    samples = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found:
            name, labels, value = found.groups()
            samples[name, frozenset(_LABEL.findall(labels))] = float(value)
    return samples
