//! Runs kernels on the CPU for tests, and provides their buffers and reference results.

use super::kv_pages::twin::{Fp8Head, decoded};
use super::{Activation, Address, Launch, PageFormat, on_device};
use crate::random::Random;
use half::{bf16, f16};
use skep_cuda_host::Order;

/// Runs a kernel in several thread orders. `written` is the output to compare: it has the same initial contents in each
/// run and must have the same final contents. If there is a device, the kernel runs there last, and its output remains in
/// `written`.
pub(super) fn run<P: Copy>(launch: &Launch, params: &P, written: &mut [&mut [u16]]) {
    let Launch { kernel, grid, block, shared_bytes } = launch;
    let name = kernel.to_string();
    let copy = |values: &[&mut [u16]]| values.iter().map(|values| values.to_vec()).collect::<Vec<_>>();
    let before = copy(written);
    let mut first = None;
    for order in [Order::FORWARD, Order::BACKWARD, Order::shuffled(7)] {
        for (values, before) in written.iter_mut().zip(&before) {
            values.copy_from_slice(before);
        }
        let launch =
            skep_cuda_host::Launch { grid: *grid, block: *block, shared_bytes: *shared_bytes, order };
        // SAFETY: the tests keep the buffers of their parameters alive while the kernel runs, with sizes that match the
        // shapes.
        unsafe { skep_cuda_host::launch(&name, &launch, params) }.expect(&name);
        let after = copy(written);
        let first = first.get_or_insert_with(|| after.clone());
        assert!(*first == after, "{name} depends on the order of its threads");
    }
    on_device::with(|device| {
        for (values, before) in written.iter_mut().zip(&before) {
            values.copy_from_slice(before);
        }
        on_device::run(device, launch, params);
    });
}

/// Returns the address of a slice, and remembers the slice for runs on a device.
pub(super) fn address<T>(values: &[T]) -> Address {
    on_device::remember(values);
    Address(values.as_ptr() as u64)
}

impl Activation {
    pub(super) const ALL: [Activation; 2] = [Activation::Bf16, Activation::F16];

    pub(super) fn encode(self, value: f32) -> u16 {
        match self {
            Activation::Bf16 => bf16::from_f32(value).to_bits(),
            Activation::F16 => f16::from_f32(value).to_bits(),
        }
    }

    pub(super) fn decode(self, bits: u16) -> f64 {
        match self {
            Activation::Bf16 => bf16::from_bits(bits).to_f64(),
            Activation::F16 => f16::from_bits(bits).to_f64(),
        }
    }

    /// Returns values between -1 and 1, aligned like a device's buffers.
    pub(super) fn random(self, random: &mut Random, count: usize) -> Buffer {
        Buffer::new((0..count).map(|_| self.encode(random.signed())).collect())
    }

    pub(super) fn zeros(self, count: usize) -> Buffer {
        Buffer::new(vec![0; count])
    }

    /// Returns half a step of the format at 1, which is the relative rounding error.
    pub(super) fn rounding(self) -> f64 {
        match self {
            Activation::Bf16 => 1.0 / 256.0,
            Activation::F16 => 1.0 / 2048.0,
        }
    }

    #[track_caller]
    pub(super) fn assert_close(self, found: &[u16], expected: &[f64], tolerance: f64) {
        assert_eq!(found.len(), expected.len());
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            let found = self.decode(*found);
            let bound = tolerance + expected.abs() * self.rounding();
            assert!((found - expected).abs() <= bound, "{self:?} at {index}: {found} for {expected}");
        }
    }
}

/// A buffer of 16-bit values, aligned to 16 bytes.
pub(super) struct Buffer {
    lines: Vec<[u64; 2]>,
    count: usize,
}

impl Buffer {
    pub(super) fn new(values: Vec<u16>) -> Self {
        let mut buffer = Buffer { lines: vec![[0; 2]; values.len().div_ceil(8)], count: values.len() };
        buffer.values_mut().copy_from_slice(&values);
        buffer
    }

    pub(super) fn values(&self) -> &[u16] {
        // SAFETY: the lines hold at least `count` values, and every bit pattern is valid.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.count) }
    }

    pub(super) fn values_mut(&mut self) -> &mut [u16] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.count) }
    }

    pub(super) fn address(&self) -> Address {
        address(self.values())
    }
}

/// Keys and values of several sequences, in pages in random order.
pub(super) struct Context {
    activation: Activation,
    pub(super) format: PageFormat,
    pub(super) keys: Buffer,
    pub(super) values: Buffer,
    /// The scales of FP8, `[pages, kv_heads, 2, page_size]`.
    pub(super) scales: Vec<f32>,
    /// `[sequences, table_stride]`.
    pub(super) page_tables: Vec<u32>,
    pub(super) table_stride: usize,
    pub(super) page_size: usize,
    kv_heads: usize,
    head_size: usize,
}

impl Context {
    pub(super) fn random(
        activation: Activation,
        format: PageFormat,
        random: &mut Random,
        contexts: &[u32],
        kv_heads: usize,
        head_size: usize,
    ) -> Self {
        let page_size = super::PAGE_POSITIONS as usize;
        let pages_of = |context: &u32| (*context as usize).div_ceil(page_size);
        let table_stride = contexts.iter().map(pages_of).max().unwrap_or(0);
        let pages: usize = contexts.iter().map(pages_of).sum();
        let mut page_tables = vec![u32::MAX; contexts.len() * table_stride];
        let mut free: Vec<u32> = (0..pages as u32).collect();
        for (table, context) in page_tables.chunks_mut(table_stride).zip(contexts) {
            for page in &mut table[..pages_of(context)] {
                *page = free.swap_remove(random.next_u64() as usize % free.len());
            }
        }
        let count = pages * page_size * kv_heads * head_size;
        let mut scales = Vec::new();
        let [keys, values] = match format {
            PageFormat::Activations => [0, 1].map(|_| activation.random(random, count)),
            PageFormat::Fp8 => {
                scales.resize(pages * kv_heads * 2 * page_size, 0.0);
                [0, 1].map(|which| {
                    let mut bytes = Vec::with_capacity(count);
                    for head in 0..pages * page_size * kv_heads {
                        let Fp8Head { codes, scale } = Fp8Head::random(random, head_size);
                        bytes.extend(codes);
                        scales[scale_at(head / kv_heads, head % kv_heads, kv_heads, which)] = scale;
                    }
                    Buffer::new(
                        bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect(),
                    )
                })
            }
        };
        Context {
            activation,
            format,
            keys,
            values,
            scales,
            page_tables,
            table_stride,
            page_size,
            kv_heads,
            head_size,
        }
    }

    /// Returns the address of the scales.
    pub(super) fn scale_address(&self) -> Address {
        match self.format {
            PageFormat::Activations => Address::NONE,
            PageFormat::Fp8 => address(&self.scales),
        }
    }

    /// Returns the error of the weights of values, which the second product rounds: to the format of the activations, or to
    /// BF16 if values are in FP8.
    pub(super) fn weight_rounding(&self) -> f64 {
        match self.format {
            PageFormat::Activations => self.activation.rounding(),
            PageFormat::Fp8 => Activation::Bf16.rounding(),
        }
    }

    /// Returns the keys (0) or the values (1) of a head at a slot.
    fn head(&self, slot: usize, kv_head: usize, which: usize) -> Vec<f64> {
        let half = if which == 0 { &self.keys } else { &self.values };
        let at = (slot * self.kv_heads + kv_head) * self.head_size;
        match self.format {
            PageFormat::Activations => half.values()[at..at + self.head_size]
                .iter()
                .map(|bits| self.activation.decode(*bits))
                .collect(),
            PageFormat::Fp8 => {
                let scale = f64::from(self.scales[scale_at(slot, kv_head, self.kv_heads, which)]);
                let codes =
                    half.values()[at / 2..][..self.head_size / 2].iter().flat_map(|pair| pair.to_le_bytes());
                codes.map(|code| decoded(code) * scale).collect()
            }
        }
    }

    /// Computes the attention of a query over these positions of a sequence.
    pub(super) fn attend(
        &self,
        query: &[u16],
        sequence: usize,
        kv_head: usize,
        seen: std::ops::Range<usize>,
        scale: f64,
    ) -> Vec<f64> {
        let decode = |bits: &u16| self.activation.decode(*bits);
        let slot = |position: usize| {
            let page = self.page_tables[sequence * self.table_stride + position / self.page_size] as usize;
            page * self.page_size + position % self.page_size
        };
        let score = |position| {
            let key = self.head(slot(position), kv_head, 0);
            query.iter().zip(key).map(|(q, k)| decode(q) * k).sum::<f64>() * scale
        };
        let scores: Vec<f64> = seen.clone().map(score).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut out = vec![0.0; self.head_size];
        for (position, weight) in seen.zip(weights) {
            for (out, value) in out.iter_mut().zip(self.head(slot(position), kv_head, 1)) {
                *out += weight / total * value;
            }
        }
        out
    }
}

/// Returns the index of the scale of a key (0) or a value (1).
fn scale_at(slot: usize, kv_head: usize, kv_heads: usize, which: usize) -> usize {
    let page_size = super::PAGE_POSITIONS as usize;
    ((slot / page_size * kv_heads + kv_head) * 2 + which) * page_size + slot % page_size
}
