//! Bytes, compared.

/// Whether two texts are the same. What `==` calls in a wasm module looks at
/// each byte by itself.
pub(crate) fn equal(one: &[u8], other: &[u8]) -> bool {
    let ((one_words, one_rest), (words, rest)) = (one.as_chunks::<8>(), other.as_chunks());
    one.len() == other.len()
        && one_words.iter().zip(words).all(|(one, other)| one == other)
        && one_rest == rest
}

/// Whether a text begins so.
pub(crate) fn begins(text: &[u8], beginning: &[u8]) -> bool {
    text.get(..beginning.len()).is_some_and(|start| equal(start, beginning))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_counts() {
        for len in 0..40 {
            let text = vec![b'x'; len];
            assert!(equal(&text, &text) && begins(&[&text[..], b"y"].concat(), &text));
            assert!(!equal(&text, &[&text[..], b"x"].concat()));
            for at in 0..len {
                let mut other = text.clone();
                other[at] = b'y';
                assert!(!equal(&text, &other) && !begins(&text, &other));
                assert!(!begins(&text[..at], &text));
            }
        }
    }
}
