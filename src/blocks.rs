//! Where an event stream can be cut: after a blank line, and between comments.
//!
//! A block is what belongs together, at most one event: its lines up to the
//! blank one that dispatches it (WHATWG HTML, section 9.2.6). Comments outside
//! of an event are blocks of their own, so that no ping is ever held back.

use memchr::memchr2;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Line {
    #[default]
    Empty,
    Comment,
    Field,
}

/// Splits an event stream into blocks, whatever chunks it comes in.
#[derive(Debug, Default)]
pub struct Blocks {
    line: Line,
    /// The block has a field.
    started: bool,
    /// The last line ended in CR: an LF that follows belongs to it.
    after_cr: bool,
}

impl Blocks {
    /// How many of these bytes, which come next, belong to the block that is
    /// under way, and whether it is complete then. At least one does, if there
    /// are any.
    pub fn next(&mut self, bytes: &[u8]) -> (usize, bool) {
        let mut at = 0usize;
        if std::mem::take(&mut self.after_cr) && bytes.first() == Some(&b'\n') {
            at = 1;
            if !self.started {
                return (at, true);
            }
        }
        loop {
            let rest = bytes.get(at..).unwrap_or_default();
            let Some(first) = rest.first() else { return (at, false) };
            if self.line == Line::Empty && !matches!(first, b'\r' | b'\n') {
                self.line = if *first == b':' { Line::Comment } else { Line::Field };
                self.started |= self.line == Line::Field;
            }
            let Some(end) = memchr2(b'\r', b'\n', rest) else {
                return (bytes.len(), !self.started);
            };
            at = at.saturating_add(end).saturating_add(1);
            if rest.get(end) == Some(&b'\r') {
                match bytes.get(at) {
                    Some(b'\n') => at = at.saturating_add(1),
                    Some(_) => {}
                    None => self.after_cr = true,
                }
            }
            let was_blank = std::mem::take(&mut self.line) == Line::Empty;
            if was_blank || !self.started {
                self.started = false;
                return (at, true);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blocks of a stream that comes in these chunks; what is cut short by
    /// a chunk's end has a `|` there, what isn't complete ends in `…`.
    fn blocks(chunks: &[&str]) -> Vec<String> {
        let mut blocks = Blocks::default();
        let mut all = Vec::new();
        let mut block = String::new();
        for chunk in chunks {
            let mut rest = *chunk;
            while !rest.is_empty() {
                let (len, complete) = blocks.next(rest.as_bytes());
                let (part, tail) = rest.split_at(len);
                block.push_str(part);
                rest = tail;
                if complete {
                    all.push(std::mem::take(&mut block));
                } else {
                    block.push('|');
                }
            }
        }
        if !block.is_empty() {
            all.push(format!("{block}…"));
        }
        all
    }

    #[test]
    fn an_event_goes_to_its_blank_line() {
        for end in ["\n", "\r", "\r\n"] {
            let event = format!("id: 1{end}data: x{end}{end}");
            let two = format!("{event}{event}");
            assert_eq!(blocks(&[&two]), [event.clone(), event]);
        }
        assert_eq!(blocks(&["data: x\n"]), ["data: x\n|…"]);
        assert_eq!(blocks(&["da", "ta: x", "\n", "\ni"]), ["da|ta: x|\n|\n", "i|…"]);
    }

    #[test]
    fn what_follows_a_cr_goes_with_it() {
        assert_eq!(
            blocks(&["data\r", "\n\r", "\nid\r\n\r\n"]),
            ["data\r|\n\r", "\n", "id\r\n\r\n"]
        );
        assert_eq!(blocks(&["data\r", "\r", "id\r\r"]), ["data\r|\r", "id\r\r"]);
        assert_eq!(blocks(&[":\r", "\n:x\r\n"]), [":\r", "\n", ":x\r\n"]);
    }

    #[test]
    fn comments_between_events_are_not_held() {
        assert_eq!(blocks(&[": pi", "ng\n", ":\n\n"]), [": pi", "ng\n", ":\n", "\n"]);
        assert_eq!(blocks(&["data:x\n: ping\n", "\n"]), ["data:x\n: ping\n|\n"]);
        assert_eq!(blocks(&["\n\n"]), ["\n", "\n"]);
        assert_eq!(blocks(&["retry: 5\n\n: ok\n\n"]), ["retry: 5\n\n", ": ok\n", "\n"]);
    }
}
