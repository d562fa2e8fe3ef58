//! Rows of the embedding table.

use super::tiles::Tiles;
use super::{Activation, Address, Family, Kernel, Launch};
use crate::{DType, KernelError};

/// The parameters of the kernel. Tokens whose row is not in the table give zeros.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingParams {
    /// u32 `[rows]`.
    pub tokens: Address,
    /// `[vocabulary, width]`, in the format of its [`Table`].
    pub table: Address,
    /// `[rows, width]`.
    pub out: Address,
    pub width: u32,
    pub vocabulary: u32,
    /// The token of the table's first row.
    pub first: u32,
}

/// The memory layout of an embedding table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// Values in the format of the activations.
    Plain,
    /// Quantized [tiles](super::tiles), which are converted to activations.
    Tiles(DType, Activation),
}

/// Returns the launch for this number of rows.
pub fn launch(params: &EmbeddingParams, rows: u32, table: Table) -> Result<Launch, KernelError> {
    const OP: &str = "embedding";
    super::multiple_of_8(OP, "width", params.width)?;
    let kernel = Kernel::of(Family::Embedding);
    let kernel = match table {
        Table::Plain => kernel,
        Table::Tiles(dtype, activation) => {
            Tiles::read_by(OP, dtype)?;
            let block = dtype.block_len() as u32;
            let whole = params.width.is_multiple_of(block);
            super::require(whole, OP, "width", params.width, || format!("a multiple of {block}"))?;
            kernel.format(dtype).activation(activation)
        }
    };
    Ok(Launch::new(kernel, [rows, 1, 1], 128))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cuda::{host, matmul::tests::Made},
        random::Random,
    };

    #[test]
    fn each_token_gets_its_row_and_unknown_tokens_get_zeros() {
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
            first: 0,
        };
        let launch = launch(&params, tokens.len() as u32, Table::Plain).expect("good shapes");
        host::run(&launch, &params, &mut [out.values_mut()]);
        for (row, token) in out.values().chunks(width).zip(tokens) {
            let zeros = vec![0; width];
            assert_eq!(row, table.values().chunks(width).nth(token as usize).unwrap_or(&zeros));
        }
    }

    #[test]
    fn rows_of_quantized_tables_are_converted_to_activations() {
        let mut random = Random::fresh();
        let (width, vocabulary) = (1280, 21);
        let tokens = [4_u32, 22, 0, 5, 13, 21];
        for made in Made::of_every_format(&mut random, width, vocabulary) {
            let Some((dtype, tiles, values)) = made.as_tiles() else { continue };
            for activation in Activation::ALL {
                let mut out = activation.zeros(width * tokens.len());
                let params = EmbeddingParams {
                    tokens: host::address(&tokens),
                    table: host::address(tiles),
                    out: out.address(),
                    width: width as u32,
                    vocabulary: vocabulary as u32,
                    first: 1,
                };
                let launch = launch(&params, tokens.len() as u32, Table::Tiles(dtype, activation));
                host::run(&launch.expect("good shapes"), &params, &mut [out.values_mut()]);
                let row =
                    |token: &u32| match values.chunks(width).nth(token.wrapping_sub(params.first) as usize) {
                        Some(row) => row.iter().map(|value| f64::from(*value)).collect(),
                        None => vec![0.0; width],
                    };
                let expected: Vec<f64> = tokens.iter().flat_map(row).collect();
                activation.assert_close(out.values(), &expected, 1e-6);
            }
        }
    }

    #[test]
    fn unsupported_widths_are_rejected() {
        let none = Address::NONE;
        let params =
            EmbeddingParams { tokens: none, table: none, out: none, width: 12, vocabulary: 1, first: 0 };
        assert!(launch(&params, 1, Table::Plain).expect_err("12 is unsupported").to_string().contains("12"));
        let params = EmbeddingParams { width: 288, ..params };
        let refused = |dtype| {
            launch(&params, 1, Table::Tiles(dtype, Activation::F16))
                .expect_err("288 is unsupported")
                .to_string()
        };
        assert!(refused(DType::Q4K).contains("multiple of 256"), "{}", refused(DType::Q4K));
        assert!(refused(DType::F32).contains("Q4_K, Q6_K"), "{}", refused(DType::F32));
    }
}
