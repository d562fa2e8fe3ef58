//! A device with buffers in which operations are timed, one after the other.

use half::bf16;

use super::list::{Cases, Contexts, Operation, Prefix, Prompt, Role, Sizes};
use super::pool::{Pool, aligned};
use super::{ACTIVATION, Rate};
use crate::KernelError;
use crate::cuda::attention_decode::{
    Blocks, Plan, Rows, SharedRow, Split, blocks_per_split, rows_per_shared_split, rows_per_split,
    shared_ranges,
};
use crate::cuda::attention_prefill::QueryTile;
use crate::cuda::blas::Blas;
use crate::cuda::ceilings::{filled_with, pattern};
use crate::cuda::device::{Device, DeviceBuffer, Slice};
use crate::cuda::embedding::Table;
use crate::cuda::matmul::{OutputFormat, Weights};
use crate::cuda::operation::{
    ACTIVATION_BYTES, Decode, Embedding, GatedProduct, MOST_UNEXPANDED_ROWS, Matrix, Pages, Prefill, Product,
    Products, Qkv, RmsNorm, Sample,
};
use crate::cuda::qkv::Pairing;
use crate::cuda::rates::Peaks;
use crate::cuda::sample::{STATE_BYTES, SampleRow};
use crate::cuda::timing::{Pace, recorded_ms};
use crate::cuda::{PAGE_POSITIONS, PageFormat};

/// Bit 6 of a byte, which blocks do not have here. All scales are then numbers below 2.
const LARGE_EXPONENT: u8 = 0x40;
/// Minimum number of entries in a row of a page table, as in steps of the executor.
const LEAST_STRIDE: u32 = 64;
/// Number of numbers whose sum is a logit, and its standard deviation.
const LOGIT_TERMS: usize = 12;
const LOGIT_DEVIATION: f32 = 3.0;
const EPSILON: f32 = 1e-5;
/// Base of the rotary frequencies.
const THETA: f32 = 10_000.0;

/// A device with buffers of random numbers.
pub struct Stand<'a> {
    device: &'a Device,
    blas: Option<&'a Blas>,
    sizes: Sizes,
    far_bytes: usize,
    pace: Pace,
    /// Numbers between -1 and 1, which operations only read.
    values: Pool,
    /// Blocks of quantized weights.
    blocks: Pool,
    /// Destinations.
    scratch: Pool,
}

impl<'a> Stand<'a> {
    /// Prepares a device, whose products may use this library. From now on the library times the products that it plans.
    pub fn new(
        device: &'a Device,
        blas: Option<&'a Blas>,
        sizes: Sizes,
        cases: &Cases,
    ) -> Result<Self, KernelError> {
        if let Some(blas) = blas {
            blas.set_measures(true);
        }
        let pattern = pattern(ACTIVATION);
        let blocks: Vec<u8> = pattern.iter().map(|byte| byte & !LARGE_EXPONENT).collect();
        let (far_bytes, pace) = (cases.far_bytes, cases.pace);
        let (values, scratch) = (Pool::new(device, &pattern)?, Pool::new(device, &pattern)?);
        let blocks = Pool::new(device, &blocks)?;
        Ok(Stand { device, blas, sizes, far_bytes, pace, values, blocks, scratch })
    }

    /// Measures an operation.
    pub fn measure(&mut self, operation: &Operation, peaks: &Peaks) -> Result<Rate, KernelError> {
        let hidden = self.sizes.hidden;
        let ms = match *operation {
            Operation::Launch => self.rms_norm(1, 8),
            Operation::RmsNorm { rows } => self.rms_norm(rows, hidden),
            Operation::Product { role, weights, rows } => self.product(role, weights, rows),
            Operation::Qkv { rows } => self.qkv(rows),
            Operation::AttentionDecode(contexts) => self.attention_decode(contexts),
            Operation::AttentionPrefill(prompt) => self.attention_prefill(prompt),
            Operation::Swiglu { rows } => self.swiglu(rows),
            Operation::Embedding { rows } => self.embedding(rows),
            Operation::Sample { rows, is_greedy } => self.sample(rows, is_greedy),
        }?;
        Ok(operation.counts(&self.sizes).rate(ms * 1e3, peaks))
    }

    fn rms_norm(&mut self, rows: u32, width: u32) -> Result<f64, KernelError> {
        let Stand { device, pace, values, scratch, .. } = self;
        let bytes = activations(rows, width);
        let [x, weight] = values.slices(device, [bytes, activations(1, width)])?;
        let [residual, out] = scratch.slices(device, [bytes; 2])?;
        let norm =
            RmsNorm { x: Some(x), residual, sum: residual, weight, out, rows, width, epsilon: EPSILON };
        recorded_ms(device, *pace, |_| device.rms_norm(&norm, ACTIVATION))
    }

    fn product(&mut self, role: Role, weights: Weights, rows: u32) -> Result<f64, KernelError> {
        let Stand { device, blas, sizes, far_bytes, pace, values, blocks, scratch } = self;
        let [inputs, outputs] = role.shape(sizes);
        let [empty] = values.slices(device, [0])?;
        let data_bytes = matrix(weights, [inputs, outputs], empty).bytes()?;
        let step = aligned(data_bytes);
        let copies = far_bytes.div_ceil(step).max(1);
        let [plain, packed, expanded] = match weights {
            Weights::Plain => [copies * step, 0, 0],
            Weights::Tiles(_) if rows <= MOST_UNEXPANDED_ROWS => [0, copies * step, 0],
            Weights::Tiles(_) => [0, copies * step, activations(outputs, inputs)],
        };
        let [x, plain] = values.slices(device, [activations(rows, inputs), plain])?;
        let [packed] = blocks.slices(device, [packed])?;
        let data = if weights == Weights::Plain { plain } else { packed };
        let copy = |number: usize| {
            let at = number % copies * step;
            Ok::<_, KernelError>(matrix(weights, [inputs, outputs], data.part(at..at + data_bytes)?))
        };
        if role == Role::GateUp {
            let [gate_up, out, expanded] = scratch
                .slices(device, [activations(rows, outputs), activations(rows, outputs / 2), expanded])?;
            let products = Products::Fastest { library: *blas, expanded: Some(expanded) };
            let product = GatedProduct { x, rows, gate_up, out };
            return recorded_ms(device, *pace, |number| {
                device.gated_matmul(&copy(number)?, &product, ACTIVATION, products)
            });
        }
        let output_format = if role == Role::Head { OutputFormat::F32 } else { OutputFormat::Activations };
        let y_stride = outputs.next_multiple_of(8);
        let [y, expanded] = scratch.slices(device, [size(rows) * size(y_stride) * 4, expanded])?;
        let products = Products::Fastest { library: *blas, expanded: Some(expanded) };
        let product = Product { x, rows, y, y_stride, output_format };
        recorded_ms(device, *pace, |number| device.matmul(&copy(number)?, &product, ACTIVATION, products))
    }

    fn qkv(&mut self, rows: u32) -> Result<f64, KernelError> {
        let Stand { device, sizes, pace, scratch, .. } = self;
        // Rows of a decode step are in separate pages, and rows of a prompt follow each other.
        let apart = if rows <= 64 { PAGE_POSITIONS } else { 1 };
        let position_bytes = activations(sizes.kv_heads, sizes.head_size);
        let kv_bytes = size((rows * apart).next_multiple_of(PAGE_POSITIONS)) * position_bytes;
        let [qkv, keys, values] =
            scratch.slices(device, [activations(rows, sizes.qkv_width()), kv_bytes, kv_bytes])?;
        let positions = words(device, 0..rows)?;
        let slots = words(device, (0..rows).flat_map(|row| [row * apart, 0]))?;
        let pair = |index: u32| THETA.powf(-2.0 * index as f32 / sizes.head_size as f32);
        let frequencies = words(device, (0..sizes.head_size / 2).map(|index| pair(index).to_bits()))?;
        let pages = pages(sizes, keys, values, None);
        let turned = Qkv {
            qkv,
            bias: None,
            q_norm: None,
            k_norm: None,
            positions: positions.slice(),
            slots: slots.slice(),
            frequencies: frequencies.slice(),
            rows,
            pairing: Pairing::Halves,
            epsilon: EPSILON,
        };
        recorded_ms(device, *pace, |_| device.qkv(&turned, &pages, ACTIVATION))
    }

    fn attention_decode(&mut self, contexts: Contexts) -> Result<f64, KernelError> {
        let Stand { device, sizes, far_bytes, pace, values, scratch, .. } = self;
        let Contexts { sequences, context, rows: of_each, prefix, pages: format } = contexts;
        let Sizes { heads, kv_heads, head_size, .. } = *sizes;
        let (rows, page_count) = (sequences * of_each, context.div_ceil(PAGE_POSITIONS));
        let [half, scales] = pool_bytes(sizes, format, sequences * page_count);
        let copies = far_bytes.div_ceil(2 * half).max(1);
        let q_bytes = activations(rows, sizes.qkv_width());
        let [q, keys, values, scales] =
            values.slices(device, [q_bytes, copies * half, copies * half, copies * scales])?;
        // The pages of sequences that grow together alternate. Common pages are those of the first sequence.
        let stride = page_count.max(LEAST_STRIDE).next_power_of_two();
        let common = contexts.shared() / PAGE_POSITIONS;
        let tables = (0..copies as u32).flat_map(|copy| {
            let page = move |page: u32, sequence: u32| {
                (copy * page_count + page) * sequences + if page < common { 0 } else { sequence }
            };
            (0..sequences).flat_map(move |sequence| {
                (0..stride).map(move |at| if at < page_count { page(at, sequence) } else { 0 })
            })
        });
        let table_words: Vec<u32> = tables.collect();
        let tables = words(device, table_words.iter().copied())?;
        let table_bytes = size(sequences * stride) * 4;
        let blocks = Blocks {
            at_once: device.attention_blocks(head_size, ACTIVATION, format)?,
            per_split: blocks_per_split(heads, kv_heads),
            rows: rows_per_split(heads, kv_heads),
            shared_rows: rows_per_shared_split(heads, kv_heads, head_size),
        };
        let planned = (0..sequences).map(|sequence| Rows {
            sequence,
            first_row: sequence * of_each,
            count: of_each,
            first_position: context - of_each,
        });
        let planned: Vec<Rows> = planned.collect();
        let ranges = match prefix {
            Prefix::Together(_) => {
                let of_first: Vec<&[u32]> = table_words.chunks(size(stride)).take(planned.len()).collect();
                shared_ranges(&planned, &of_first, &blocks)
            }
            Prefix::Own | Prefix::Apart(_) => Vec::new(),
        };
        let mut plan = Plan::new(&planned, &ranges, 0, &blocks);
        // Recorded steps have room for the most splits of any step with as many rows.
        let split_count = blocks.max_splits(rows).max(plan.splits.len() as u32);
        plan.splits.resize(size(split_count), Split::SPARE);
        let splits = words(device, plan.splits.iter().flat_map(Split::words))?;
        let shared_rows = words(device, plan.shared_rows.iter().flat_map(SharedRow::words))?;
        let arrivals = device.zeroed(size(blocks.max_arrivals(rows)) * 4)?;
        let state_count = blocks.max_states(rows).max(plan.states);
        let state_bytes = size(state_count) * size(heads * (head_size + 2)) * 4;
        let [out, states] = scratch.slices(device, [activations(rows, heads * head_size), state_bytes])?;
        let pages = pages(sizes, keys, values, (format == PageFormat::Fp8).then_some(scales));
        recorded_ms(device, *pace, |number| {
            let at = number % copies * table_bytes;
            let decode = Decode {
                q,
                page_tables: tables.slice().part(at..at + table_bytes)?,
                splits: splits.slice(),
                shared_rows: shared_rows.slice(),
                states,
                arrivals: arrivals.slice(),
                out,
                rows,
                sequences,
                split_count,
                state_count,
                table_stride: stride,
                window: 0,
                scale: scale(head_size),
            };
            device.attention_decode(&decode, &pages, ACTIVATION)
        })
    }

    fn attention_prefill(&mut self, prompt: Prompt) -> Result<f64, KernelError> {
        let Stand { device, sizes, pace, values, scratch, .. } = self;
        let Prompt { rows, prefix, pages: format } = prompt;
        let Sizes { heads, head_size, .. } = *sizes;
        let page_count = (prefix + rows).div_ceil(PAGE_POSITIONS);
        let [half, scales] = pool_bytes(sizes, format, page_count);
        let q_bytes = activations(rows, sizes.qkv_width());
        let [q, keys, values, scales] = values.slices(device, [q_bytes, half, half, scales])?;
        let [out] = scratch.slices(device, [activations(rows, heads * head_size)])?;
        let page_table = words(device, 0..page_count)?;
        // The longest come first, as in a step.
        let mut tiles: Vec<QueryTile> = QueryTile::cover(0, 0, rows, prefix, 0).collect();
        tiles.reverse();
        let tile_words = words(device, tiles.iter().flat_map(QueryTile::words))?;
        let prefill = Prefill {
            q,
            out,
            page_tables: page_table.slice(),
            tiles: tile_words.slice(),
            tile_count: tiles.len() as u32,
            table_stride: page_count,
            window: 0,
            scale: scale(head_size),
            splits: None,
        };
        let pages = pages(sizes, keys, values, (format == PageFormat::Fp8).then_some(scales));
        recorded_ms(device, *pace, |_| device.attention_prefill(&prefill, &pages, ACTIVATION))
    }

    fn swiglu(&mut self, rows: u32) -> Result<f64, KernelError> {
        let Stand { device, sizes, pace, values, scratch, .. } = self;
        let wide = sizes.wide;
        let [gate_up] = values.slices(device, [activations(rows, 2 * wide)])?;
        let [out] = scratch.slices(device, [activations(rows, wide)])?;
        recorded_ms(device, *pace, |_| device.swiglu(gate_up, out, rows, wide, ACTIVATION))
    }

    fn embedding(&mut self, rows: u32) -> Result<f64, KernelError> {
        let Stand { device, sizes, pace, values, scratch, .. } = self;
        let Sizes { hidden, vocabulary, .. } = *sizes;
        let [table] = values.slices(device, [activations(vocabulary, hidden)])?;
        let [out] = scratch.slices(device, [activations(rows, hidden)])?;
        // Knuth's multiplicative hash spreads the tokens over the table.
        let tokens = words(device, (0..rows).map(|row| row.wrapping_mul(2_654_435_761) % vocabulary))?;
        let lookup = Embedding {
            tokens: tokens.slice(),
            table,
            format: Table::Plain,
            out,
            rows,
            width: hidden,
            first: 0,
            count: vocabulary,
        };
        recorded_ms(device, *pace, |_| device.embedding(&lookup, ACTIVATION))
    }

    fn sample(&mut self, rows: u32, is_greedy: bool) -> Result<f64, KernelError> {
        let Stand { device, sizes, pace, scratch, .. } = self;
        let vocabulary = sizes.vocabulary;
        let logits_stride = vocabulary.next_multiple_of(8);
        let row = words(device, logits(size(logits_stride)).map(f32::to_bits))?;
        let logits = filled_with(device, size(rows) * row.bytes(), &row)?;
        let of_row = |row: u32| {
            let chosen = SampleRow { logits: row, seed: row.into(), ..SampleRow::GREEDY };
            match is_greedy {
                true => chosen,
                false => SampleRow { temperature: 0.8, top_k: 50, top_p: 0.95, ..chosen },
            }
        };
        let row_words = words(device, (0..rows).flat_map(|row| of_row(row).words()))?;
        let result_bytes = size(rows) * 4;
        let [adjusted, states, tokens, nothing] = scratch
            .slices(device, [size(rows) * size(vocabulary) * 4, size(rows) * STATE_BYTES, result_bytes, 0])?;
        device.clear(states)?;
        let sample = Sample {
            logits: logits.slice(),
            rows: row_words.slice(),
            adjustments: nothing,
            masks: nothing,
            drawn: nothing,
            adjusted,
            states,
            tokens,
            row_count: rows,
            choice: of_row(0).choice(),
            vocabulary,
            logits_stride,
        };
        recorded_ms(device, *pace, |_| device.sample(&sample))
    }
}

/// Returns the size of rows of activations in bytes.
fn activations(rows: u32, width: u32) -> usize {
    size(rows) * size(width) * ACTIVATION_BYTES
}

fn size(count: u32) -> usize {
    count as usize
}

fn scale(head_size: u32) -> f32 {
    1.0 / (head_size as f32).sqrt()
}

fn matrix(weights: Weights, [inputs, outputs]: [u32; 2], data: Slice<'_>) -> Matrix<'_> {
    Matrix { weights, data, bias: None, outputs, inputs }
}

/// Returns the size in bytes of the keys of pages, which is that of their values, and of their scales.
fn pool_bytes(sizes: &Sizes, format: PageFormat, pages: u32) -> [usize; 2] {
    let (kv_heads, head_size) = (size(sizes.kv_heads), size(sizes.head_size));
    [format.half_bytes(kv_heads, head_size), format.scale_bytes(kv_heads)].map(|bytes| size(pages) * bytes)
}

fn pages<'a>(sizes: &Sizes, keys: Slice<'a>, values: Slice<'a>, scales: Option<Slice<'a>>) -> Pages<'a> {
    let Sizes { heads, kv_heads, head_size, .. } = *sizes;
    Pages { keys, values, scales, heads, kv_heads, head_size }
}

/// Returns a buffer of these words.
fn words(device: &Device, words: impl IntoIterator<Item = u32>) -> Result<DeviceBuffer, KernelError> {
    let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    device.copied(&bytes)
}

/// Returns logits that are distributed about as those of a model.
fn logits(count: usize) -> impl Iterator<Item = f32> {
    let uniform: Vec<f32> = pattern(ACTIVATION)
        .chunks_exact(ACTIVATION_BYTES)
        .map(|pair| bf16::from_le_bytes([pair[0], pair[1]]).to_f32())
        .collect();
    // The variance of a number between -1 and 1 is a third.
    let deviation = (LOGIT_TERMS as f32 / 3.0).sqrt();
    (0..count).map(move |index| {
        let terms = (0..LOGIT_TERMS).map(|term| uniform[(index * LOGIT_TERMS + term) % uniform.len()]);
        terms.sum::<f32>() / deviation * LOGIT_DEVIATION
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::device::Emulation;
    use crate::cuda::rates::Bound;
    use crate::cuda::rates::list::tests::SMALL;

    /// Returns every kind of operation with few rows and short contexts.
    fn small_cases() -> Cases {
        let pages = PageFormat::Activations;
        let contexts =
            |sequences, context, rows, prefix| Contexts { sequences, context, rows, prefix, pages };
        let fp8 = |contexts: Contexts| Contexts { pages: PageFormat::Fp8, ..contexts };
        Cases {
            rows: vec![1, 3],
            dense_rows: vec![1, 9],
            quantized_rows: vec![2, 9],
            most_logit_rows: 2,
            decodes: vec![
                contexts(1, 40, 1, Prefix::Own),
                contexts(3, 17, 1, Prefix::Own),
                contexts(2, 33, 4, Prefix::Own),
                contexts(3, 170, 1, Prefix::Together(160)),
                contexts(3, 170, 1, Prefix::Apart(160)),
                fp8(contexts(2, 33, 4, Prefix::Own)),
                fp8(contexts(3, 170, 1, Prefix::Together(160))),
            ],
            prompts: vec![
                Prompt { rows: 20, prefix: 0, pages },
                Prompt { rows: 9, prefix: 24, pages },
                Prompt { rows: 9, prefix: 24, pages: PageFormat::Fp8 },
            ],
            draws: vec![1, 2],
            far_bytes: 1 << 20,
            pace: Pace { runs: 1, run_ms: 0.0 },
        }
    }

    #[test]
    fn every_operation_runs_and_takes_time() {
        let device = Device::emulated(Emulation::default());
        let peaks = Peaks::of_small(&device);
        let cases = small_cases();
        let mut stand = Stand::new(&device, None, SMALL, &cases).unwrap();
        for operation in cases.operations(&SMALL) {
            let label = format!("{}, {}", operation.name(), operation.shape(&SMALL));
            let rate = stand.measure(&operation, &peaks).unwrap_or_else(|error| panic!("{label}: {error}"));
            assert!(rate.us > 0.0 && rate.gb_per_s > 0.0 && rate.copy_share > 0.0, "{label}: {rate:?}");
            let multiplies = operation.counts(&SMALL).operations > 0.0;
            assert_eq!(rate.tflops > 0.0, multiplies, "{label}: {rate:?}");
            assert_eq!((rate.bound, rate.product_share), (Bound::Copies, None), "{label}");
        }
    }

    impl Peaks {
        /// Peaks of the emulated device, which has no library, from a short copy.
        fn of_small(device: &Device) -> Self {
            let [from, to] = [0, 1].map(|_| device.zeroed(1 << 16).unwrap());
            let pace = Pace { runs: 1, run_ms: 0.0 };
            let ms = recorded_ms(device, pace, |_| device.copy(from.slice(), to.slice())).unwrap();
            Peaks { copy_gb_per_s: 2.0 * 65536.0 / ms / 1e6, product_tflops: None }
        }
    }

    #[test]
    fn logits_are_spread_as_a_models() {
        let all: Vec<f32> = logits(4096).collect();
        let mean = all.iter().sum::<f32>() / all.len() as f32;
        let variance = all.iter().map(|logit| (logit - mean).powi(2)).sum::<f32>() / all.len() as f32;
        assert!(mean.abs() < 0.5 && (variance.sqrt() - LOGIT_DEVIATION).abs() < 0.3, "{mean} {variance}");
    }

    #[test]
    fn every_operation_runs_on_a_device_with_the_library() {
        crate::cuda::on_device::with(|device| {
            let blas = Blas::open(device).ok();
            let peaks = Peaks::of(device, blas.as_ref(), &SMALL).unwrap();
            let cases = small_cases();
            let mut stand = Stand::new(device, blas.as_ref(), SMALL, &cases).unwrap();
            for operation in cases.operations(&SMALL) {
                let rate = stand.measure(&operation, &peaks).unwrap();
                assert!(rate.us > 0.0 && rate.us < 1e5, "{operation:?}: {rate:?}");
            }
        });
    }
}
