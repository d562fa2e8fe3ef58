//! Mutates inputs in the way of libFuzzer, but without coverage feedback. The same seed gives the same
//! mutations.

const MAX_BYTES: usize = 64 << 10;
const ODD_NUMBERS: [u64; 14] = [
    0,
    1,
    2,
    7,
    0x7f,
    0x80,
    0xff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    u64::MAX,
];
const ODD_TEXTS: [&str; 12] = [
    "null",
    "-1",
    "1e999",
    "18446744073709551616",
    "\"\"",
    "[]",
    "{}",
    "\\ud83d",
    "\u{feff}",
    "é🐝",
    "\r\n",
    "\0",
];

pub struct Mutator {
    state: u64,
    seeds: Vec<Vec<u8>>,
    words: &'static [&'static str],
}

impl Mutator {
    pub fn new(seed: u64, seeds: Vec<Vec<u8>>, words: &'static [&'static str]) -> Self {
        Mutator { state: seed | 1, seeds, words }
    }

    /// Returns the next input.
    pub fn next_input(&mut self) -> Vec<u8> {
        let mut input = self.any_seed();
        for _ in 0..1 + self.below(6) {
            self.change(&mut input);
        }
        input.truncate(MAX_BYTES);
        input
    }

    fn any_seed(&mut self) -> Vec<u8> {
        match self.seeds.len() {
            0 => Vec::new(),
            count => {
                let at = self.below(count);
                self.seeds[at].clone()
            }
        }
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let at = self.below(input.len() + 1);
        let end = (at + 1 + self.below(16)).min(input.len());
        match self.below(12) {
            0 if at < input.len() => input[at] ^= 1 << self.below(8),
            1 if at < input.len() => input[at] = self.next() as u8,
            2 => drop(input.drain(at..end.max(at))),
            3 => {
                let piece = input[at..end.max(at)].to_vec();
                let times = 1 + self.below(40);
                self.insert(input, &piece.repeat(times));
            }
            4 => {
                let number = ODD_NUMBERS[self.below(ODD_NUMBERS.len())].wrapping_add(self.below(3) as u64);
                let width = 1 << self.below(4);
                let bytes = number.to_le_bytes();
                for (place, byte) in input[at..].iter_mut().zip(&bytes[..width]) {
                    *place = *byte;
                }
            }
            5 => {
                let text = ODD_TEXTS[self.below(ODD_TEXTS.len())];
                self.insert(input, text.as_bytes());
            }
            6 | 7 if !self.words.is_empty() => {
                let word = self.words[self.below(self.words.len())];
                self.insert(input, word.as_bytes());
            }
            8 => {
                let number = ODD_NUMBERS[self.below(ODD_NUMBERS.len())].to_string();
                self.replace_number(input, at, number.as_bytes());
            }
            9 => {
                let other = self.any_seed();
                let from = self.below(other.len() + 1);
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            10 => {
                let other = self.any_seed();
                let from = self.below(other.len() + 1);
                let to = (from + self.below(64)).min(other.len());
                self.insert(input, &other[from..to]);
            }
            _ => input.truncate(at),
        }
    }

    fn insert(&mut self, input: &mut Vec<u8>, piece: &[u8]) {
        let at = self.below(input.len() + 1);
        input.splice(at..at, piece.iter().copied());
    }

    /// Replaces the first number in the text from `at` on.
    fn replace_number(&mut self, input: &mut Vec<u8>, at: usize, number: &[u8]) {
        let Some(from) = input[at..].iter().position(u8::is_ascii_digit).map(|found| at + found) else {
            return;
        };
        let digits = input[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        input.splice(from..from + digits, number.iter().copied());
    }

    /// Draws the next number of Xorshift64*.
    fn next(&mut self) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, count: usize) -> usize {
        (self.next() >> 33) as usize % count.max(1)
    }
}
