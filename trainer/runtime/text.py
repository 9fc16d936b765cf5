"""Human-readable text: sizes, and names read from untrusted files."""


def readable(size_bytes: float) -> str:
    """Return a size such as `512 B`, `54.2 MiB` or `16.1 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} TiB"


def clean(text: str) -> str:
    """Replace control characters, which must not reach a terminal or a page.

    Call this when printing or drawing text, not when storing it.
    """
    return "".join(c if c.isprintable() else "�" for c in text)


def clean_lines(text: str) -> str:
    return "\n".join(map(clean, text.splitlines()))
