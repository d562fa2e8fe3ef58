//! Fresh random inputs for the parity tests. The seed is printed so that a failure can be investigated.

pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn fresh() -> Self {
        let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
        println!("seed {nanos}");
        Random(nanos as u64)
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `count`, which must not be 0.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        (self.next_u64() % count as u64) as usize
    }

    /// Returns a uniform float in -1..1.
    pub(crate) fn signed(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.signed()).collect()
    }
}
