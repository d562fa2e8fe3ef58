//! Rows of the embedding table.

use super::{Address, Launch};
use crate::KernelError;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingParams {
    /// u32 `[rows]`
    pub tokens: Address,
    /// 16-bit `[vocabulary, width]`
    pub table: Address,
    /// `[rows, width]`
    pub out: Address,
    pub width: u32,
    pub vocabulary: u32,
}

/// For so many rows.
pub fn launch(params: &EmbeddingParams, rows: u32) -> Result<Launch, KernelError> {
    super::multiple_of_8("embedding", "width", params.width)?;
    Ok(Launch::new("embedding".to_owned(), [rows, 1, 1], 128))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cuda::{Activation, host},
        random::Random,
    };

    #[test]
    fn each_row_is_its_token_and_an_unknown_token_is_zeros() {
        let mut random = Random::fresh();
        let (width, vocabulary) = (2056, 7);
        let table = Activation::Bf16.random(&mut random, width * vocabulary);
        let tokens = [3_u32, 0, 6, 7, 3];
        let mut out = Activation::Bf16.zeros(width * tokens.len());
        let params = EmbeddingParams {
            tokens: host::address(&tokens),
            table: table.address(),
            out: out.address(),
            width: width as u32,
            vocabulary: vocabulary as u32,
        };
        let launch = launch(&params, tokens.len() as u32).expect("good shapes");
        host::run(&launch, &params, &mut [out.values_mut()]);
        for (row, token) in out.values().chunks(width).zip(tokens) {
            let zeros = vec![0; width];
            assert_eq!(row, table.values().chunks(width).nth(token as usize).unwrap_or(&zeros));
        }
    }

    #[test]
    fn a_width_that_no_thread_can_move_is_refused() {
        let none = Address::NONE;
        let params = EmbeddingParams { tokens: none, table: none, out: none, width: 12, vocabulary: 1 };
        assert!(launch(&params, 1).expect_err("12").to_string().contains("12"));
    }
}
