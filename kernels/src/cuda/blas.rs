//! Products with dense weights through cuBLASLt. A product is planned once for each shape and then only launched.
//! Asking the library for an algorithm takes longer than many of the products, so plans are kept. While a model is prepared,
//! the algorithms that the library proposes are timed, and so is the kernel for few rows beside the library; later shapes get
//! the algorithm that the library ranks first, so that no request waits for measurements. The library expects
//! column-major matrices. A row-major matrix is its transpose in column-major order, so `y^T = weights · x^T` is computed
//! and no data is rearranged.
//!
//! Invariant: a plan is used only for operands that match its layout. The library is optional: without it, `open` returns
//! an error and the `gemm` kernels are used.

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::sys::{cublasLtMatmulAlgo_t, cudaDataType};
use cudarc::driver::sys::CUstream;

use super::cublas_lt::{CublasLt, CublasVersion, Handle, Matrices, Matrix, Operands, Preference, Product};
use super::device::{Device, DeviceBuffer, Event};
use super::matmul::{MatmulParams, OutputFormat};
use super::plan_cache::PlanCache;
use super::{Activation, Address};
use crate::KernelError;
pub use crate::cuda_types::{Format, MatrixLayout, ProductLayout};

const OP: &str = "dense product";
/// Maximum number of algorithms that are timed for a product.
const MAX_ALGORITHMS: usize = 8;
/// Number of timed runs, of which the shortest counts.
const TIMED_RUNS: usize = 3;
/// Size of the memory that is written before a timed run, so that caches have nothing else: more than any L2 cache has.
const OTHER_BYTES: usize = 192 << 20;
/// The workspace size that the library's documentation recommends for the largest devices.
const WORKSPACE_BYTES: usize = 32 << 20;
/// Maximum number of plans, which is about the number of a model's shapes times the number of its batch sizes. Each plan
/// takes a few hundred bytes.
const MAX_PLANS: usize = 8192;
/// The least alignment that the fast algorithms can use, and the greatest that they ask for, in bytes.
const ALIGNMENTS: (u64, u64) = (16, 256);
/// The greatest dimension, since the library counts in 32 bits.
const MAX_SIZE: u32 = i32::MAX.unsigned_abs();

/// Returns the version of the cuBLASLt that [`Blas::open`] finds on this machine, and its name or path.
pub fn find() -> Result<(CublasVersion, PathBuf), KernelError> {
    let library = CublasLt::open(None)?;
    Ok((library.version(), library.path().to_owned()))
}

/// cuBLASLt on one device, working in that device's queue.
pub struct Blas {
    plans: Mutex<PlanCache<ProductLayout, Plan>>,
    /// Whether another kernel was faster than the library.
    slower: Mutex<PlanCache<ProductLayout, bool>>,
    measures: AtomicBool,
    /// Recorded before and after a timed run.
    timer: [Event; 2],
    workspace: DeviceBuffer,
    handle: Handle,
    library: Arc<CublasLt>,
    /// Declared last, so that it is dropped after everything that lives in its context.
    device: Device,
}

struct Plan {
    product: Product,
    weights: Matrix,
    x: Matrix,
    y: Matrix,
    algorithm: cublasLtMatmulAlgo_t,
}

impl Blas {
    /// Opens the library for a device.
    pub fn open(device: &Device) -> Result<Self, KernelError> {
        let library = Arc::new(CublasLt::open(None)?);
        let workspace = device.uninitialized(WORKSPACE_BYTES)?;
        // The handle is created in the thread's current context, which this call sets to the device's.
        stream(device)?;
        let handle = Handle::new(&library)?;
        let plans = Mutex::new(PlanCache::of_at_most(MAX_PLANS));
        let slower = Mutex::new(PlanCache::of_at_most(MAX_PLANS));
        let timer = [device.timed_event()?, device.timed_event()?];
        let measures = AtomicBool::new(false);
        Ok(Blas { plans, slower, measures, timer, workspace, handle, library, device: device.clone() })
    }

    /// Sets whether products that are planned from now on are timed. A timed product waits for the device's queue.
    pub fn set_measures(&self, measures: bool) {
        self.measures.store(measures, Ordering::Relaxed);
    }

    /// Returns the version of the cuBLASLt library that was opened.
    pub fn version(&self) -> CublasVersion {
        self.library.version()
    }

    /// Returns the name or path under which the library was found.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// Queues `y = x · weights^T + bias`. Weights and bias are in the format of the activations. The first product of a
    /// layout is planned, which takes longer and may load the algorithm's code: run it once before it is recorded.
    ///
    /// # Safety
    /// The addresses are valid on the device for these shapes until the queue has been waited for.
    pub unsafe fn matmul(&self, params: &MatmulParams, activation: Activation) -> Result<(), KernelError> {
        let layout = ProductLayout::of(params, activation)?;
        if params.rows == 0 {
            return Ok(());
        }
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: guaranteed by the caller.
        let plan = plans.get(layout, || unsafe { self.plan(layout, params) })?;
        if layout.bias {
            plan.product.set_bias(params.bias.0)?;
        }
        // SAFETY: the plan was made for this layout, and the caller guarantees the rest.
        unsafe { self.multiply(plan, params) }
    }

    /// Returns whether `other`, which queues the same product, was faster than the library when both were timed. It is
    /// `None` if they were not and products are not timed now.
    ///
    /// # Safety
    /// As for [`matmul`](Self::matmul).
    pub(super) unsafe fn is_slower_than(
        &self,
        params: &MatmulParams,
        activation: Activation,
        other: impl Fn() -> Result<(), KernelError>,
    ) -> Result<Option<bool>, KernelError> {
        let layout = ProductLayout::of(params, activation)?;
        let mut slower = self.slower.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slower) = slower.known(&layout) {
            return Ok(Some(*slower));
        }
        if !self.measures.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let memory = self.other_memory();
        // SAFETY: guaranteed by the caller.
        let library = self.milliseconds(memory.as_ref(), || unsafe { self.matmul(params, activation) });
        let library = match library {
            Err(KernelError::NoAlgorithm { .. }) => f32::INFINITY,
            timed => timed?,
        };
        let other = self.milliseconds(memory.as_ref(), other)?;
        slower.get(layout, || Ok(other <= library)).map(|slower| Some(*slower))
    }

    /// Queues a planned product.
    ///
    /// # Safety
    /// As for [`matmul`](Self::matmul), and the plan was made for the layout of these parameters.
    unsafe fn multiply(&self, plan: &Plan, params: &MatmulParams) -> Result<(), KernelError> {
        let stream = stream(&self.device)?;
        let operands = Operands {
            a: params.weights.0 as *const c_void,
            b: params.x.0 as *const c_void,
            d: params.y.0 as *mut c_void,
            workspace: self.workspace.address().0 as *mut c_void,
            workspace_bytes: self.workspace.bytes(),
        };
        // SAFETY: the workspace is used in this queue only, and the caller guarantees the rest.
        unsafe {
            self.handle.multiply(stream.cast(), &plan.product, plan.matrices(), &plan.algorithm, operands)
        }
    }

    /// Plans a product, and times the algorithms if products are timed now.
    ///
    /// # Safety
    /// As for [`matmul`](Self::matmul), and the layout is that of these parameters.
    unsafe fn plan(&self, layout: ProductLayout, params: &MatmulParams) -> Result<Plan, KernelError> {
        // The library works in the context that is current on this thread.
        stream(&self.device)?;
        let library = &self.library;
        let mut product = Product::new(library, layout.bias)?;
        if layout.bias {
            // Any address will do: the library only checks whether there is one.
            product.set_bias(ALIGNMENTS.1)?;
        }
        let matrix = |of: MatrixLayout| {
            let (rows, columns, stride) = (of.rows.into(), of.columns.into(), of.stride.into());
            Matrix::new(library, of.format.of_library(), rows, columns, stride)
        };
        let (weights, x, y) = (matrix(layout.weights)?, matrix(layout.x)?, matrix(layout.y)?);
        let preference = Preference::new(library, self.workspace.bytes(), layout.alignment)?;
        let most = if self.measures.load(Ordering::Relaxed) { MAX_ALGORITHMS } else { 1 };
        let algorithms = self
            .handle
            .ranked(&product, Matrices { a: &weights, b: &x, d: &y }, &preference, most)
            .map_err(|error| KernelError::NoAlgorithm { layout, reason: error.to_string() })?;
        let mut plan = Plan { product, weights, x, y, algorithm: algorithms[0] };
        if algorithms.len() > 1 {
            if layout.bias {
                plan.product.set_bias(params.bias.0)?;
            }
            let memory = self.other_memory();
            let mut timed = Vec::new();
            for algorithm in &algorithms {
                plan.algorithm = *algorithm;
                // SAFETY: guaranteed by the caller.
                timed.push(self.milliseconds(memory.as_ref(), || unsafe { self.multiply(&plan, params) }));
            }
            plan.algorithm = algorithms[shortest(&timed)];
        }
        Ok(plan)
    }

    /// Returns memory whose contents take the place of all others in caches, unless the device has no room for it.
    fn other_memory(&self) -> Option<DeviceBuffer> {
        self.device.uninitialized(OTHER_BYTES).ok()
    }

    /// Returns the shortest time that the device takes for `work`, after a first run that loads its code. With other memory,
    /// its operands are in no cache, as in a step that has read other weights since.
    fn milliseconds(
        &self,
        other: Option<&DeviceBuffer>,
        work: impl Fn() -> Result<(), KernelError>,
    ) -> Result<f32, KernelError> {
        let [begin, end] = &self.timer;
        work()?;
        let mut shortest = f32::INFINITY;
        for _ in 0..TIMED_RUNS {
            if let Some(other) = other {
                self.device.clear(other.slice())?;
            }
            begin.record()?;
            work()?;
            end.record()?;
            end.synchronize()?;
            shortest = shortest.min(begin.milliseconds_until(end)?);
        }
        Ok(shortest)
    }
}

/// Returns the index of the shortest time; of equal ones, the first. Algorithms that failed are passed over, unless all did.
fn shortest(timed: &[Result<f32, KernelError>]) -> usize {
    let times = timed.iter().enumerate().filter_map(|(index, time)| Some((index, *time.as_ref().ok()?)));
    times.min_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(index, _)| index)
}

impl Drop for Blas {
    fn drop(&mut self) {
        // The fields were created in the device's context, which has to be current on this thread while they are dropped.
        let _ = self.device.stream();
    }
}

impl Plan {
    fn matrices(&self) -> Matrices<'_> {
        Matrices { a: &self.weights, b: &self.x, d: &self.y }
    }
}

impl ProductLayout {
    /// Returns the layout of a product, or an error if the library does not support it. A product without rows is supported
    /// and computes nothing.
    pub fn of(params: &MatmulParams, activation: Activation) -> Result<Self, KernelError> {
        let MatmulParams { x, weights, bias, y, rows, inputs, outputs, y_stride, output_format, .. } =
            *params;
        for (what, size) in [("inputs", inputs), ("outputs", outputs), ("y_stride", y_stride)] {
            super::multiple_of_8(OP, what, size)?;
            super::at_most(OP, what, size, MAX_SIZE)?;
        }
        super::at_most(OP, "rows", rows, MAX_SIZE)?;
        let supported = || format!("at least the {outputs} outputs");
        super::require(y_stride >= outputs, OP, "y_stride", y_stride, supported)?;
        let biases = u32::from(bias != Address::NONE);
        let supported = || "none".to_owned();
        super::require(
            output_format != OutputFormat::F32 || biases == 0,
            OP,
            "the number of biases of float32 sums",
            biases,
            supported,
        )?;
        let (least, most) = ALIGNMENTS;
        let alignment = 1u32 << (x.0 | weights.0 | bias.0 | y.0 | most).trailing_zeros();
        let supported = || format!("a multiple of {least}");
        let what = "the alignment of an address in bytes";
        super::require(u64::from(alignment) >= least, OP, what, alignment, supported)?;
        let factors = match activation {
            Activation::Bf16 => Format::Bf16,
            Activation::F16 => Format::F16,
        };
        let output = match output_format {
            OutputFormat::Activations => factors,
            OutputFormat::F32 => Format::F32,
        };
        let columns = |format, rows, columns, stride| MatrixLayout { format, rows, columns, stride };
        Ok(ProductLayout {
            weights: columns(factors, inputs, outputs, inputs),
            x: columns(factors, inputs, rows, inputs),
            y: columns(output, outputs, rows, y_stride),
            bias: biases > 0,
            alignment,
        })
    }
}

impl Format {
    fn of_library(self) -> cudaDataType {
        match self {
            Format::Bf16 => cudaDataType::CUDA_R_16BF,
            Format::F16 => cudaDataType::CUDA_R_16F,
            Format::F32 => cudaDataType::CUDA_R_32F,
        }
    }
}

/// Returns the stream behind a device's queue, and makes the device's context current on this thread.
fn stream(device: &Device) -> Result<CUstream, KernelError> {
    device.stream().ok_or_else(|| KernelError::NoDevice {
        reason: format!("cuBLASLt needs an NVIDIA device, and {} is not one", device.name()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::device::Emulation;
    use crate::{cuda::on_device, random::Random};

    const BF16: Activation = Activation::Bf16;

    fn dense(rows: u32, inputs: u32, outputs: u32) -> MatmulParams {
        MatmulParams::dense([0x10_0000, 0x20_0000, 0x30_0000].map(Address), [rows, inputs, outputs])
    }

    #[test]
    fn row_major_operands_are_described_as_their_transposes() {
        let params = MatmulParams { y_stride: 80, output_format: OutputFormat::F32, ..dense(5, 64, 24) };
        let layout = ProductLayout::of(&params, BF16).unwrap();
        let columns = |format, rows, columns, stride| MatrixLayout { format, rows, columns, stride };
        assert_eq!(layout.weights, columns(Format::Bf16, 64, 24, 64));
        assert_eq!(layout.x, columns(Format::Bf16, 64, 5, 64));
        assert_eq!(layout.y, columns(Format::F32, 24, 5, 80));
        assert!(!layout.bias);
    }

    #[test]
    fn a_missing_library_or_device_is_an_error() {
        let error = Blas::open(&Device::emulated(Emulation::default())).err().expect("no CUDA device");
        let text = error.to_string();
        assert!(text.contains("was not found") || text.contains("emulated is not one"), "{text}");
    }

    #[test]
    fn plans_are_shared_only_by_equal_layouts() {
        let params = dense(5, 64, 24);
        let layout = |params: MatmulParams| ProductLayout::of(&params, BF16).unwrap();
        let elsewhere = MatmulParams { x: Address(0x50_0000), y: Address(0x60_0000), ..params };
        assert_eq!(layout(params), layout(elsewhere));
        let mut all = [
            params,
            dense(6, 64, 24),
            dense(5, 72, 24),
            dense(5, 64, 32),
            MatmulParams { y_stride: 32, ..params },
            MatmulParams { output_format: OutputFormat::F32, ..params },
            MatmulParams { bias: Address(0x40_0000), ..params },
            MatmulParams { x: Address(0x10_0010), ..params },
        ]
        .map(layout)
        .to_vec();
        all.push(ProductLayout::of(&params, Activation::F16).unwrap());
        for (i, one) in all.iter().enumerate() {
            all[..i].iter().for_each(|other| assert_ne!(one, other));
        }
    }

    #[test]
    fn alignment_is_common_to_all_addresses_and_capped() {
        let with = |x, bias| {
            let params = MatmulParams { x: Address(x), bias: Address(bias), ..dense(5, 64, 24) };
            ProductLayout::of(&params, BF16)
        };
        assert_eq!(with(0x1000, 0).unwrap().alignment, 256);
        assert_eq!(with(0x1040, 0).unwrap().alignment, 64);
        assert_eq!(with(0x1040, 0x2010).unwrap().alignment, 16);
        let text = with(0x1008, 0).unwrap_err().to_string();
        assert!(text.contains("alignment") && text.contains("multiple of 16"), "{text}");
    }

    #[test]
    fn unsupported_products_are_rejected() {
        let with_bias = MatmulParams { bias: Address(0x40_0000), ..dense(5, 64, 24) };
        for (params, what) in [
            (dense(5, 63, 24), "inputs is 63"),
            (dense(5, 0, 24), "inputs is 0"),
            (dense(5, 64, 20), "outputs is 20"),
            (MatmulParams { y_stride: 26, ..dense(5, 64, 24) }, "y_stride is 26"),
            (MatmulParams { y_stride: 16, ..dense(5, 64, 24) }, "at least the 24 outputs"),
            (
                MatmulParams { output_format: OutputFormat::F32, ..with_bias },
                "the number of biases of float32 sums is 1",
            ),
            (dense(1 << 31, 64, 24), "rows is 2147483648"),
            (dense(5, 1 << 31, 24), "inputs is 2147483648"),
        ] {
            let text = ProductLayout::of(&params, BF16).expect_err("rejected").to_string();
            assert!(text.contains(what), "{text}");
        }
        assert!(ProductLayout::of(&dense(0, 64, 24), BF16).is_ok(), "a product without rows");
    }

    #[test]
    fn the_error_for_a_missing_algorithm_names_the_shape() {
        let params = MatmulParams { bias: Address(0x40_0000), y_stride: 32, ..dense(5, 64, 24) };
        let layout = ProductLayout::of(&params, BF16).unwrap();
        let text = KernelError::NoAlgorithm { layout, reason: "unsupported".to_owned() }.to_string();
        for part in ["5 rows", "64 inputs", "24 outputs", "32 apart", "Bf16 to Bf16", "a bias", "unsupported"]
        {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn the_first_of_the_fastest_algorithms_is_kept() {
        let failed = || Err(KernelError::Cublas { call: "product", reason: "unsupported".to_owned() });
        for (timed, expected) in [
            (vec![Ok(3.0), Ok(1.0), Ok(2.0), Ok(1.0)], 1),
            (vec![failed(), Ok(2.0), Ok(f32::INFINITY)], 1),
            (vec![failed(), failed()], 0),
        ] {
            assert_eq!(shortest(&timed), expected, "{timed:?}");
        }
    }

    /// Checks a product on the device against a plain reference.
    fn check(device: &Device, blas: &Blas, shape: MatmulParams, activation: Activation, with_bias: bool) {
        let MatmulParams { rows, inputs, outputs, y_stride, output_format, .. } = shape;
        let [rows, inputs, outputs, stride] = [rows, inputs, outputs, y_stride].map(|size| size as usize);
        let mut random = Random::fresh();
        let x = activation.random(&mut random, rows * inputs);
        let weights = activation.random(&mut random, outputs * inputs);
        let bias = activation.random(&mut random, outputs);
        let encode = |value: f32| match output_format {
            OutputFormat::Activations => activation.encode(value).to_le_bytes().to_vec(),
            OutputFormat::F32 => value.to_le_bytes().to_vec(),
        };
        let decode = |bytes: &[u8]| match output_format {
            OutputFormat::Activations => activation.decode(u16::from_le_bytes(bytes.try_into().unwrap())),
            OutputFormat::F32 => f64::from(f32::from_le_bytes(bytes.try_into().unwrap())),
        };
        let copied = |values: &[u16]| {
            let bytes: Vec<u8> = values.iter().flat_map(|bits| bits.to_le_bytes()).collect();
            device.copied(&bytes).unwrap()
        };
        let [x_there, weights_there, bias_there] = [&x, &weights, &bias].map(|of| copied(of.values()));
        let mut found = encode(-77.0).repeat(rows * stride);
        let y_there = device.copied(&found).unwrap();
        let params = MatmulParams {
            x: x_there.address(),
            weights: weights_there.address(),
            bias: if with_bias { bias_there.address() } else { Address::NONE },
            y: y_there.address(),
            ..shape
        };
        // SAFETY: buffers of these shapes, which are kept until they have been read.
        unsafe { blas.matmul(&params, activation) }.unwrap();
        y_there.read(&mut found).unwrap();
        let bytes = found.len() / (rows * stride);
        let values = |of: &[u16]| of.iter().map(|bits| activation.decode(*bits)).collect::<Vec<f64>>();
        let (x, weights, bias) = (values(x.values()), values(weights.values()), values(bias.values()));
        let rounding = if output_format == OutputFormat::F32 { 0.0 } else { activation.rounding() };
        for (row, (found, x)) in found.chunks(stride * bytes).zip(x.chunks(inputs)).enumerate() {
            let found: Vec<f64> = found.chunks(bytes).map(decode).collect();
            for (output, weights) in weights.chunks(inputs).enumerate() {
                let sum: f64 = x.iter().zip(weights).map(|(x, w)| x * w).sum();
                let expected = if with_bias { sum + bias[output] } else { sum };
                let difference = (found[output] - expected).abs();
                let bound = 1e-6 * inputs as f64 + expected.abs() * rounding;
                assert!(difference <= bound, "{params:?} at {row}, {output}: {difference} from {expected}");
            }
            assert!(found[outputs..].iter().all(|value| *value == -77.0), "{params:?} wrote between rows");
        }
    }

    #[test]
    fn products_on_a_device_match_a_plain_reference() {
        on_device::with(|device| {
            for measures in [false, true] {
                match Blas::open(device) {
                    Ok(blas) => check_shapes(device, &blas, measures),
                    Err(error @ KernelError::NoCublas { .. }) => return eprintln!("skipped: {error}"),
                    Err(error) => panic!("{error}"),
                }
            }
        });
    }

    fn check_shapes(device: &Device, blas: &Blas, measures: bool) {
        blas.set_measures(measures);
        let planned = || blas.plans.lock().unwrap().len();
        for (rows, inputs, outputs, y_stride) in
            [(1, 64, 8, 8), (7, 256, 72, 72), (33, 512, 136, 200), (160, 1024, 256, 256)]
        {
            for activation in Activation::ALL {
                for (output_format, with_bias) in [
                    (OutputFormat::Activations, false),
                    (OutputFormat::Activations, true),
                    (OutputFormat::F32, false),
                ] {
                    let shape = MatmulParams { y_stride, output_format, ..dense(rows, inputs, outputs) };
                    let before = planned();
                    check(device, blas, shape, activation, with_bias);
                    check(device, blas, shape, activation, with_bias);
                    assert_eq!(planned(), before + 1, "planned once");
                }
            }
        }
    }
}
