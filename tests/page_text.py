"""The text and the tags of an HTML page, for tests of the report."""

from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """`words`: the text outside of style sheets; `tags` with their attributes; every element is
    closed in order.
    """

    def __init__(self, html):
        super().__init__()
        self.words = ""
        self.tags = list[tuple[str, dict[str, str | None]]]()
        self._open = []
        self.feed(html.replace("<wbr>", ""))
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.words += f"{data} "
