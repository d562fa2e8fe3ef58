//! Reads little-endian values from a byte slice.
//!
//! Invariant: a cursor never reads past the end and never allocates. The only part of GGUF that it knows is
//! the encoding of strings.

/// A read position in a file.
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    pub(crate) fn position(&self) -> usize {
        self.position
    }

    /// Returns the next `count` bytes. `what` names their content in errors.
    pub(crate) fn take(&mut self, count: u64, what: &str) -> Result<&'a [u8], String> {
        let rest = &self.bytes[self.position..];
        match usize::try_from(count).ok().and_then(|count| rest.get(..count)) {
            Some(taken) => {
                self.position += taken.len();
                Ok(taken)
            }
            None => Err(format!(
                "{what} needs {count} bytes at offset {}, but the file has only {} left",
                self.position,
                rest.len()
            )),
        }
    }

    /// Checks that the rest of the file can hold `count` items of at least `least_bytes` each.
    pub(crate) fn fits(&self, count: u64, least_bytes: u64, what: &str) -> Result<(), String> {
        let left = (self.bytes.len() - self.position) as u64;
        match count.checked_mul(least_bytes) {
            Some(bytes) if bytes <= left => Ok(()),
            _ => Err(format!("it declares {count} {what}, but the file has only {left} bytes left")),
        }
    }

    pub(crate) fn string(&mut self, what: &str) -> Result<&'a str, String> {
        let at = self.position;
        let length = self.u64(what)?;
        let bytes = self.take(length, what)?;
        std::str::from_utf8(bytes).map_err(|_| format!("{what} at offset {at} is not valid UTF-8"))
    }

    pub(crate) fn u32(&mut self, what: &str) -> Result<u32, String> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: &str) -> Result<u64, String> {
        self.array(what).map(u64::from_le_bytes)
    }

    pub(crate) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let bytes = self.take(N as u64, what)?;
        Ok(bytes.try_into().expect("take returned N bytes"))
    }
}
