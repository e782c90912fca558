//! A header map as proxy-wasm hands it over (ABI 0.2.1,
//! `proxy_get_header_map_pairs`): how many fields there are, the lengths of
//! each one's name and value, all as four bytes in little endian, and then
//! names and values, a NUL behind each.
//!
//! The SDK copies each of them out into memory of its own: for a request that
//! costs more than all that is then done about it.

/// A header field: its name in lower case, as Envoy gives it, and its value.
pub type Field<'a> = (&'a [u8], &'a [u8]);

/// The fields of a header map. What is none has none.
pub fn fields(map: &[u8]) -> Vec<Field<'_>> {
    try_fields(map).unwrap_or_default()
}

fn try_fields(map: &[u8]) -> Option<Vec<Field<'_>>> {
    const LENGTHS: usize = 8;
    let (count, rest) = number(map)?;
    let (mut lengths, mut texts) = rest.split_at_checked(count.checked_mul(LENGTHS)?)?;
    let mut fields = Vec::with_capacity(count);
    for _ in 0..count {
        let (name_len, rest) = number(lengths)?;
        let (value_len, rest) = number(rest)?;
        lengths = rest;
        let (name, rest) = text(texts, name_len)?;
        let (value, rest) = text(rest, value_len)?;
        texts = rest;
        fields.push((name, value));
    }
    Some(fields)
}

fn number(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((usize::try_from(u32::from_le_bytes(*number)).ok()?, rest))
}

fn text(bytes: &[u8], len: usize) -> Option<(&[u8], &[u8])> {
    let (text, rest) = bytes.split_at_checked(len)?;
    Some((text, rest.split_first()?.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &[u8] = b"\x02\0\0\0\x05\0\0\0\x04\0\0\0\x01\0\0\0\0\0\0\0:path\0/mcp\0x\0\0";

    #[test]
    fn names_and_values() {
        assert_eq!(fields(MAP), [(&b":path"[..], &b"/mcp"[..]), (b"x", b"")]);
        assert_eq!(fields(b"\0\0\0\0"), []);
    }

    #[test]
    fn what_is_no_map_has_no_fields() {
        for end in 0..MAP.len() {
            assert_eq!(fields(&MAP[..end]), [], "{end}");
        }
        assert_eq!(fields(b"\xff\xff\xff\xff"), []);
        assert_eq!(fields(b"\x01\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff\0\0"), []);
    }
}
