//! cuBLASLt, NVIDIA's library of dense products, and the descriptions that it makes of one.
//!
//! Invariant: what is missing is an error that names it, never a panic. What the library made is given back to it, and keeps it
//! alive. It knows how to describe and to multiply, and not which products there are.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::cublaslt::sys;
use libloading::Library;

use super::library;
use crate::KernelError;

/// Where it is looked for, the newest first.
const PLACES: [&str; 4] =
    ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so", "/usr/local/cuda/lib64/libcublasLt.so"];
const OLDEST: &str = "cuBLAS 12.0";
/// `CUBLAS_OP_T`
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
    place: PathBuf,
    /// The functions are in it.
    _library: Library,
}

/// As `cublasLtGetVersion` gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CublasVersion {
    pub major: usize,
    pub minor: usize,
    pub patch: usize,
}

/// The library on the device whose context the thread had that made it.
pub(super) struct Handle {
    handle: sys::cublasLtHandle_t,
    library: Arc<CublasLt>,
}

/// `D = A^T · B`, sums in float32; the epilogue may add a bias.
pub(super) struct Product {
    description: sys::cublasLtMatmulDesc_t,
    library: Arc<CublasLt>,
}

/// A matrix that lies column by column.
pub(super) struct Matrix {
    layout: sys::cublasLtMatrixLayout_t,
    library: Arc<CublasLt>,
}

/// What an algorithm may need and may rely on.
pub(super) struct Preference {
    preference: sys::cublasLtMatmulPreference_t,
    library: Arc<CublasLt>,
}

/// The matrices of a product.
#[derive(Clone, Copy)]
pub(super) struct Matrices<'a> {
    pub a: &'a Matrix,
    pub b: &'a Matrix,
    pub d: &'a Matrix,
}

/// Addresses on the device.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub a: *const c_void,
    pub b: *const c_void,
    pub d: *mut c_void,
    pub workspace: *mut c_void,
    pub workspace_bytes: usize,
}

// SAFETY: the library may be called by any thread, also by several with one handle.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}
// SAFETY: a description is plain memory of the library, which is changed only by who has it alone.
unsafe impl Send for Product {}
// SAFETY: as above.
unsafe impl Send for Matrix {}

impl CublasLt {
    /// The library at this place, or the newest that the system finds. The caller vouches for the file: its code is run.
    pub(super) fn open(place: Option<&Path>) -> Result<Self, KernelError> {
        let (library, place) =
            library::open(place, &PLACES).map_err(|tried| KernelError::NoCublas { tried })?;
        let lacking = |symbol| KernelError::LibraryFunction {
            library: place.display().to_string(),
            symbol,
            oldest: OLDEST,
        };
        // SAFETY: the types are those of cublasLt.h, which are the same in all its versions; statuses are whole numbers.
        let functions = unsafe { Functions::find(&library, lacking) }?;
        // SAFETY: it takes nothing.
        let number = unsafe { (functions.version)() };
        let version =
            CublasVersion { major: number / 10_000, minor: number / 100 % 100, patch: number % 100 };
        Ok(CublasLt { functions, version, place, _library: library })
    }

    pub(super) fn version(&self) -> CublasVersion {
        self.version
    }

    /// The name or path by which it was found.
    pub(super) fn place(&self) -> &Path {
        &self.place
    }

    fn check(&self, call: &'static str, status: c_int) -> Result<(), KernelError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: it gives a constant string for any status.
        let reason = unsafe { CStr::from_ptr((self.functions.status_string)(status)) };
        Err(KernelError::Cublas { call, reason: reason.to_string_lossy().into_owned() })
    }
}

impl Handle {
    pub(super) fn new(library: &Arc<CublasLt>) -> Result<Self, KernelError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a handle that it writes.
        let status = unsafe { (library.functions.create)(&mut handle) };
        library.check("cublasLtCreate", status)?;
        Ok(Handle { handle, library: library.clone() })
    }

    /// The algorithm that is said to be the fastest for this product, if there is one.
    pub(super) fn fastest(
        &self,
        product: &Product,
        matrices: Matrices<'_>,
        preference: &Preference,
    ) -> Result<sys::cublasLtMatmulAlgo_t, KernelError> {
        let call = "cublasLtMatmulAlgoGetHeuristic";
        let Matrices { a, b, d } = matrices;
        let mut found = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut count = 0;
        // SAFETY: all were made by the library and are alive; one result is asked for, and there is room for one.
        let status = unsafe {
            (self.library.functions.heuristic)(
                self.handle,
                product.description,
                a.layout,
                b.layout,
                d.layout,
                d.layout,
                preference.preference,
                1,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        self.library.check(call, status)?;
        if count == 0 {
            return Err(KernelError::Cublas { call, reason: "there is none".to_owned() });
        }
        // SAFETY: written, or zero. The status is read as the number that it is, since it may be one that has no name here.
        unsafe {
            let found = found.as_ptr();
            self.library.check(call, (&raw const (*found).state).cast::<c_int>().read())?;
            Ok((&raw const (*found).algo).read())
        }
    }

    /// Puts the product into the stream.
    ///
    /// # Safety
    /// The operands are as long as the matrices say, on this device, until the stream has been waited for; the algorithm was
    /// chosen for this product and these matrices. Nothing else uses the workspace meanwhile.
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
        // SAFETY: all were made by the library and are alive, and the caller vouches for the rest. The factors are read before
        // the call returns.
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
        // SAFETY: a description that it writes.
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

    /// Where the bias is, for products from now on.
    pub(super) fn set_bias(&mut self, bias: u64) -> Result<(), KernelError> {
        self.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), KernelError> {
        let value = std::ptr::from_ref(value).cast();
        // SAFETY: made by the library, and as many bytes as the value has; they are copied.
        let status = unsafe {
            (self.library.functions.set_product)(self.description, attribute, value, size_of::<T>())
        };
        self.library.check("cublasLtMatmulDescSetAttribute", status)
    }
}

impl Matrix {
    /// Columns begin `stride` values apart.
    pub(super) fn new(
        library: &Arc<CublasLt>,
        format: sys::cudaDataType,
        rows: u64,
        columns: u64,
        stride: i64,
    ) -> Result<Self, KernelError> {
        let mut layout = std::ptr::null_mut();
        // SAFETY: a layout that it writes.
        let status = unsafe { (library.functions.matrix)(&mut layout, format, rows, columns, stride) };
        library.check("cublasLtMatrixLayoutCreate", status)?;
        Ok(Matrix { layout, library: library.clone() })
    }
}

impl Preference {
    /// All operands lie at multiples of `alignment` bytes. Partial sums, if there are any, are kept in float32 and added in one
    /// order.
    pub(super) fn new(
        library: &Arc<CublasLt>,
        workspace_bytes: usize,
        alignment: u32,
    ) -> Result<Self, KernelError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let mut preference = std::ptr::null_mut();
        // SAFETY: a preference that it writes.
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
        // SAFETY: made by the library, and as many bytes as the value has; they are copied.
        let status = unsafe {
            (self.library.functions.set_preference)(self.preference, attribute, value, size_of::<T>())
        };
        self.library.check("cublasLtMatmulPreferenceSetAttribute", status)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made once, and given back once. There is nothing to do about a failure.
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
    fn a_library_that_is_not_there_is_named_with_what_to_install_and_what_multiplies_without_it() {
        let nowhere = Path::new("/nowhere/libcublasLt.so");
        let text = CublasLt::open(Some(nowhere)).err().expect("nothing is there").to_string();
        for part in ["/nowhere/libcublasLt.so", "nvidia-cublas", "Skep's own"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_library_of_another_kind_lacks_functions() {
        // The C library is on every machine that runs this.
        let error = CublasLt::open(Some(Path::new("libc.so.6"))).err().expect("not cuBLASLt");
        assert!(
            matches!(error, KernelError::LibraryFunction { symbol: "cublasLtGetVersion", .. }),
            "{error}"
        );
        assert!(error.to_string().contains("cuBLAS 12.0 or newer"), "{error}");
    }

    /// Descriptions need no device; where the library is not, this says so.
    #[test]
    fn descriptions_are_made_and_given_back_and_wrong_ones_are_errors() {
        let library = match CublasLt::open(None) {
            Ok(library) => Arc::new(library),
            Err(error) => return eprintln!("skipped: {error}"),
        };
        assert!(library.version().major >= 11, "{} at {}", library.version(), library.place().display());
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
        assert_eq!(Arc::strong_count(&library), 2, "only the last description is left");
    }
}
