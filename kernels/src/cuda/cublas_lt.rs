//! Bindings to cuBLASLt, NVIDIA's library of dense products, and to the descriptors that it creates.
//!
//! Invariant: a missing library or function is an error that names it, never a panic. Every object that the library
//! created is destroyed by it and keeps it loaded. This module describes and multiplies; it does not know which products
//! a model needs.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::cublaslt::sys;
use libloading::Library;

use super::library;
use crate::KernelError;

/// Names and paths under which the library is searched for, newest version first.
const SEARCH_PATHS: [&str; 4] =
    ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so", "/usr/local/cuda/lib64/libcublasLt.so"];
const OLDEST: &str = "cuBLAS 12.0";
/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;

library::functions! {
    version: "cublasLtGetVersion" () -> usize,
    status_string: "cublasLtGetStatusString" (c_int) -> *const c_char,
    create: "cublasLtCreate" (*mut sys::cublasLtHandle_t) -> c_int,
    destroy: "cublasLtDestroy" (sys::cublasLtHandle_t) -> c_int,
    product: "cublasLtMatmulDescCreate" (
        *mut sys::cublasLtMatmulDesc_t,
        sys::cublasComputeType_t,
        sys::cudaDataType,
    ) -> c_int,
    destroy_product: "cublasLtMatmulDescDestroy" (sys::cublasLtMatmulDesc_t) -> c_int,
    set_product: "cublasLtMatmulDescSetAttribute" (
        sys::cublasLtMatmulDesc_t,
        sys::cublasLtMatmulDescAttributes_t,
        *const c_void,
        usize,
    ) -> c_int,
    matrix: "cublasLtMatrixLayoutCreate" (
        *mut sys::cublasLtMatrixLayout_t,
        sys::cudaDataType,
        u64,
        u64,
        i64,
    ) -> c_int,
    destroy_matrix: "cublasLtMatrixLayoutDestroy" (sys::cublasLtMatrixLayout_t) -> c_int,
    preference: "cublasLtMatmulPreferenceCreate" (*mut sys::cublasLtMatmulPreference_t) -> c_int,
    destroy_preference: "cublasLtMatmulPreferenceDestroy" (sys::cublasLtMatmulPreference_t) -> c_int,
    set_preference: "cublasLtMatmulPreferenceSetAttribute" (
        sys::cublasLtMatmulPreference_t,
        sys::cublasLtMatmulPreferenceAttributes_t,
        *const c_void,
        usize,
    ) -> c_int,
    heuristic: "cublasLtMatmulAlgoGetHeuristic" (
        sys::cublasLtHandle_t,
        sys::cublasLtMatmulDesc_t,
        sys::cublasLtMatrixLayout_t,
        sys::cublasLtMatrixLayout_t,
        sys::cublasLtMatrixLayout_t,
        sys::cublasLtMatrixLayout_t,
        sys::cublasLtMatmulPreference_t,
        c_int,
        *mut sys::cublasLtMatmulHeuristicResult_t,
        *mut c_int,
    ) -> c_int,
    matmul: "cublasLtMatmul" (
        sys::cublasLtHandle_t,
        sys::cublasLtMatmulDesc_t,
        *const c_void,
        *const c_void,
        sys::cublasLtMatrixLayout_t,
        *const c_void,
        sys::cublasLtMatrixLayout_t,
        *const c_void,
        *const c_void,
        sys::cublasLtMatrixLayout_t,
        *mut c_void,
        sys::cublasLtMatrixLayout_t,
        *const sys::cublasLtMatmulAlgo_t,
        *mut c_void,
        usize,
        sys::cudaStream_t,
    ) -> c_int,
}

pub(super) struct CublasLt {
    functions: Functions,
    version: CublasVersion,
    path: PathBuf,
    /// Keeps the functions loaded.
    _library: Library,
}

/// The version that `cublasLtGetVersion` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CublasVersion {
    pub major: usize,
    pub minor: usize,
    pub patch: usize,
}

/// A library handle for the device whose context was current on the thread that created it.
pub(super) struct Handle {
    handle: sys::cublasLtHandle_t,
    library: Arc<CublasLt>,
}

/// A descriptor of `D = A^T · B` with float32 sums. The epilogue may add a bias.
pub(super) struct Product {
    description: sys::cublasLtMatmulDesc_t,
    library: Arc<CublasLt>,
}

/// A descriptor of a column-major matrix.
pub(super) struct Matrix {
    layout: sys::cublasLtMatrixLayout_t,
    library: Arc<CublasLt>,
}

/// A descriptor of the workspace and the alignment that an algorithm may use.
pub(super) struct Preference {
    preference: sys::cublasLtMatmulPreference_t,
    library: Arc<CublasLt>,
}

/// The matrix descriptors of a product.
#[derive(Clone, Copy)]
pub(super) struct Matrices<'a> {
    pub a: &'a Matrix,
    pub b: &'a Matrix,
    pub d: &'a Matrix,
}

/// The addresses of a product's operands on the device.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub a: *const c_void,
    pub b: *const c_void,
    pub d: *mut c_void,
    pub workspace: *mut c_void,
    pub workspace_bytes: usize,
}

// SAFETY: the library may be called by any thread, even by several threads with one handle.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}
// SAFETY: a descriptor is plain memory of the library, which is changed only through an exclusive reference.
unsafe impl Send for Product {}
// SAFETY: as above.
unsafe impl Send for Matrix {}

impl CublasLt {
    /// Opens the library at this path, or the newest one that the system finds. The caller must trust the file, because its
    /// code is executed.
    pub(super) fn open(path: Option<&Path>) -> Result<Self, KernelError> {
        let (library, path) =
            library::open(path, &SEARCH_PATHS).map_err(|tried| KernelError::NoCublas { tried })?;
        let lacking = |symbol| KernelError::LibraryFunction {
            library: path.display().to_string(),
            symbol,
            oldest: OLDEST,
        };
        // SAFETY: the types are those of cublasLt.h, which are the same in all its versions; statuses are integers.
        let functions = unsafe { Functions::find(&library, lacking) }?;
        // SAFETY: the function takes no arguments.
        let number = unsafe { (functions.version)() };
        let version =
            CublasVersion { major: number / 10_000, minor: number / 100 % 100, patch: number % 100 };
        Ok(CublasLt { functions, version, path, _library: library })
    }

    pub(super) fn version(&self) -> CublasVersion {
        self.version
    }

    /// Returns the name or path under which the library was found.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn check(&self, call: &'static str, status: c_int) -> Result<(), KernelError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function returns a constant string for any status.
        let reason = unsafe { CStr::from_ptr((self.functions.status_string)(status)) };
        Err(KernelError::Cublas { call, reason: reason.to_string_lossy().into_owned() })
    }
}

impl Handle {
    pub(super) fn new(library: &Arc<CublasLt>) -> Result<Self, KernelError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the function writes the handle.
        let status = unsafe { (library.functions.create)(&mut handle) };
        library.check("cublasLtCreate", status)?;
        Ok(Handle { handle, library: library.clone() })
    }

    /// Returns the algorithms for this product in the order in which the library's heuristic ranks them, at least one and
    /// at most `most`.
    pub(super) fn ranked(
        &self,
        product: &Product,
        matrices: Matrices<'_>,
        preference: &Preference,
        most: usize,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, KernelError> {
        let call = "cublasLtMatmulAlgoGetHeuristic";
        let Matrices { a, b, d } = matrices;
        let mut found = vec![MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed(); most];
        let mut count = 0;
        // SAFETY: the library created all descriptors and they are alive; there is room for as many results as are requested.
        let status = unsafe {
            (self.library.functions.heuristic)(
                self.handle,
                product.description,
                a.layout,
                b.layout,
                d.layout,
                d.layout,
                preference.preference,
                c_int::try_from(most).unwrap_or(c_int::MAX),
                found.as_mut_ptr().cast(),
                &mut count,
            )
        };
        self.library.check(call, status)?;
        let mut algorithms = Vec::new();
        let mut failure = KernelError::Cublas { call, reason: "no algorithm was found".to_owned() };
        for found in &found[..usize::try_from(count).unwrap_or(0).min(most)] {
            let found = found.as_ptr();
            // SAFETY: the result was written or is zero. The status is read as an integer, since it may be a value that the
            // enum does not have.
            let (status, algorithm) = unsafe {
                ((&raw const (*found).state).cast::<c_int>().read(), (&raw const (*found).algo).read())
            };
            match self.library.check(call, status) {
                Ok(()) => algorithms.push(algorithm),
                Err(error) => failure = error,
            }
        }
        if algorithms.is_empty() { Err(failure) } else { Ok(algorithms) }
    }

    /// Queues the product in the stream.
    ///
    /// # Safety
    /// The operands match the matrices and stay valid on this device until the stream has been waited for. The algorithm was
    /// chosen for this product and these matrices. Nothing else uses the workspace in the meantime.
    pub(super) unsafe fn multiply(
        &self,
        stream: sys::cudaStream_t,
        product: &Product,
        matrices: Matrices<'_>,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        operands: Operands,
    ) -> Result<(), KernelError> {
        let (one, zero) = (1.0f32, 0.0f32);
        let Matrices { a, b, d } = matrices;
        // SAFETY: the library created all descriptors and they are alive, and the caller guarantees the rest. The factors are
        // read before the call returns.
        let status = unsafe {
            (self.library.functions.matmul)(
                self.handle,
                product.description,
                (&raw const one).cast(),
                operands.a,
                a.layout,
                operands.b,
                b.layout,
                (&raw const zero).cast(),
                operands.d,
                d.layout,
                operands.d,
                d.layout,
                algorithm,
                operands.workspace,
                operands.workspace_bytes,
                stream,
            )
        };
        self.library.check("cublasLtMatmul", status)
    }
}

impl Product {
    pub(super) fn new(library: &Arc<CublasLt>, bias: bool) -> Result<Self, KernelError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let mut description = std::ptr::null_mut();
        let (sums, factors) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F);
        // SAFETY: the function writes the descriptor.
        let status = unsafe { (library.functions.product)(&mut description, sums, factors) };
        library.check("cublasLtMatmulDescCreate", status)?;
        let product = Product { description, library: library.clone() };
        product.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        if bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            product.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        }
        Ok(product)
    }

    /// Sets the address of the bias for subsequent products.
    pub(super) fn set_bias(&mut self, bias: u64) -> Result<(), KernelError> {
        self.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), KernelError> {
        let value = std::ptr::from_ref(value).cast();
        // SAFETY: the library created the descriptor, and copies as many bytes as the value has.
        let status = unsafe {
            (self.library.functions.set_product)(self.description, attribute, value, size_of::<T>())
        };
        self.library.check("cublasLtMatmulDescSetAttribute", status)
    }
}

impl Matrix {
    /// Creates a descriptor of a matrix whose columns start `stride` values apart.
    pub(super) fn new(
        library: &Arc<CublasLt>,
        format: sys::cudaDataType,
        rows: u64,
        columns: u64,
        stride: i64,
    ) -> Result<Self, KernelError> {
        let mut layout = std::ptr::null_mut();
        // SAFETY: the function writes the layout.
        let status = unsafe { (library.functions.matrix)(&mut layout, format, rows, columns, stride) };
        library.check("cublasLtMatrixLayoutCreate", status)?;
        Ok(Matrix { layout, library: library.clone() })
    }
}

impl Preference {
    /// Creates a preference for operands at multiples of `alignment` bytes. Algorithms may keep partial sums only in float32
    /// and must add them in a fixed order.
    pub(super) fn new(
        library: &Arc<CublasLt>,
        workspace_bytes: usize,
        alignment: u32,
    ) -> Result<Self, KernelError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let mut preference = std::ptr::null_mut();
        // SAFETY: the function writes the preference.
        let status = unsafe { (library.functions.preference)(&mut preference) };
        library.check("cublasLtMatmulPreferenceCreate", status)?;
        let made = Preference { preference, library: library.clone() };
        made.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(workspace_bytes as u64))?;
        let reductions = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        made.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions)?;
        for operand in [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            made.set(operand, &alignment)?;
        }
        Ok(made)
    }

    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Result<(), KernelError> {
        let value = std::ptr::from_ref(value).cast();
        // SAFETY: the library created the preference, and copies as many bytes as the value has.
        let status = unsafe {
            (self.library.functions.set_preference)(self.preference, attribute, value, size_of::<T>())
        };
        self.library.check("cublasLtMatmulPreferenceSetAttribute", status)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created once and destroyed once. Nothing can be done about a failure.
        unsafe { (self.library.functions.destroy)(self.handle) };
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { (self.library.functions.destroy_product)(self.description) };
    }
}

impl Drop for Matrix {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { (self.library.functions.destroy_matrix)(self.layout) };
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { (self.library.functions.destroy_preference)(self.preference) };
    }
}

impl fmt::Display for CublasVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_for_a_missing_library_names_the_package_and_the_fallback() {
        let nowhere = Path::new("/nowhere/libcublasLt.so");
        let text = CublasLt::open(Some(nowhere)).err().expect("the library does not exist").to_string();
        for part in ["/nowhere/libcublasLt.so", "nvidia-cublas", "Skep's own"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_wrong_library_lacks_functions() {
        // The C library is on every machine that runs this.
        let error = CublasLt::open(Some(Path::new("libc.so.6"))).err().expect("not cuBLASLt");
        assert!(
            matches!(error, KernelError::LibraryFunction { symbol: "cublasLtGetVersion", .. }),
            "{error}"
        );
        assert!(error.to_string().contains("cuBLAS 12.0 or newer"), "{error}");
    }

    /// Descriptors need no device. Without the library, the test is skipped.
    #[test]
    fn descriptors_are_created_and_destroyed_and_invalid_attributes_are_errors() {
        let library = match CublasLt::open(None) {
            Ok(library) => Arc::new(library),
            Err(error) => return eprintln!("skipped: {error}"),
        };
        assert!(library.version().major >= 11, "{} at {}", library.version(), library.path().display());
        for bias in [false, true] {
            let mut product = Product::new(&library, bias).unwrap();
            product.set_bias(256).unwrap();
        }
        let bf16 = sys::cudaDataType::CUDA_R_16BF;
        Matrix::new(&library, bf16, 64, 8, 64).unwrap();
        Preference::new(&library, 32 << 20, 16).unwrap();
        let half = Product::new(&library, false).unwrap();
        let error = half.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA, &1u8);
        let text = error.expect_err("a value of the wrong size").to_string();
        assert!(text.contains("cublasLtMatmulDescSetAttribute"), "{text}");
        assert_eq!(Arc::strong_count(&library), 2, "only the last descriptor is left");
    }
}
