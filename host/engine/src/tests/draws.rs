//! Random choices, odds and text chunks for tests. A failing test prints its seed.

use super::dice::Dice;

pub struct Draws(Dice);

impl Draws {
    pub fn new(seed: u64) -> Self {
        Draws(Dice(seed))
    }

    /// Returns a number from 0 to `end - 1`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0.roll(end)
    }

    /// Returns true in one of `times` draws.
    pub fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    /// Splits the text into chunks of random length, cut between characters.
    pub fn pieces<'a>(&mut self, text: &'a str) -> Vec<&'a str> {
        let longest = *self.pick(&[1, 2, 3, 8, 40]);
        let (mut pieces, mut rest) = (Vec::new(), text);
        while !rest.is_empty() {
            let characters = 1 + self.below(longest);
            let end = rest.char_indices().nth(characters).map_or(rest.len(), |(end, _)| end);
            let (piece, after) = rest.split_at(end);
            pieces.push(piece);
            rest = after;
        }
        pieces
    }
}
