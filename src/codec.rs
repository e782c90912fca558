//! The byte layout of values in shared data: little endian, fixed widths, so
//! that the most bytes of a value follow from its bounds.

/// Writes a value.
///
/// Into room that is there already, with stores of a fixed width: appending to
/// a `Vec` is a call for each of them in a module that is built for size, and
/// in V8 the copy of eight bytes one more.
#[derive(Default)]
pub struct Writer {
    bytes: Vec<u8>,
    len: usize,
}

impl Writer {
    /// A writer with room for so many bytes; it makes more where that is too
    /// little.
    pub fn with_room(bytes: usize) -> Self {
        Writer { bytes: vec![0; bytes], len: 0 }
    }

    fn array<const N: usize>(&mut self, value: [u8; N]) {
        let end = self.len.saturating_add(N);
        if end > self.bytes.len() {
            self.bytes.resize(end.saturating_mul(2), 0);
        }
        if let Some(place) = self.bytes.get_mut(self.len..).and_then(<[u8]>::first_chunk_mut) {
            *place = value;
        }
        self.len = end;
    }

    /// A byte.
    pub fn u8(&mut self, value: u8) {
        self.array([value]);
    }

    /// Four bytes.
    pub fn u32(&mut self, value: u32) {
        self.array(value.to_le_bytes());
    }

    /// Eight bytes.
    pub fn u64(&mut self, value: u64) {
        self.array(value.to_le_bytes());
    }

    /// So many zeros, to be written over.
    pub fn room(&mut self, bytes: usize) -> &mut [u8] {
        let start = self.len;
        self.len = start.saturating_add(bytes);
        if self.len > self.bytes.len() {
            self.bytes.resize(self.len, 0);
        }
        self.bytes.get_mut(start..self.len).unwrap_or_default()
    }

    /// Sixteen bytes.
    pub fn u128(&mut self, value: u128) {
        self.array(value.to_le_bytes());
    }

    /// So many bytes, as they are.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.bytes.truncate(self.len);
        self.bytes.extend_from_slice(bytes);
        self.len = self.bytes.len();
    }

    /// A part with its length before it, in four bytes.
    pub fn block(&mut self, write: impl FnOnce(&mut Self)) {
        let before = self.len;
        self.u32(0);
        let start = self.len;
        write(self);
        let end = std::mem::replace(&mut self.len, before);
        self.u32(u32::try_from(end.saturating_sub(start)).unwrap_or(u32::MAX));
        self.len = end;
    }

    /// A list: its length in a byte, then its items; what is over 255 is left
    /// out, so the caller bounds it.
    pub fn list<T>(&mut self, items: &[T], mut write: impl FnMut(&mut Self, &T)) {
        let len = u8::try_from(items.len()).unwrap_or(u8::MAX);
        self.u8(len);
        for item in items.iter().take(usize::from(len)) {
            write(self, item);
        }
    }

    /// What was written.
    pub fn finish(mut self) -> Vec<u8> {
        self.bytes.truncate(self.len);
        self.bytes
    }
}

/// Reads a value; `None` where it ends too early.
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// A reader at the start.
    pub fn new(bytes: &'a [u8]) -> Self {
        Reader(bytes)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    /// A byte.
    pub fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    /// Four bytes.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Sixteen bytes.
    pub fn u128(&mut self) -> Option<u128> {
        self.array().map(u128::from_le_bytes)
    }

    /// A list, as [`Writer::list`] writes it.
    pub fn list<T>(&mut self, mut read: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let len = self.u8()?;
        (0..len).map(|_| read(self)).collect()
    }

    /// So many bytes.
    pub fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }
}
