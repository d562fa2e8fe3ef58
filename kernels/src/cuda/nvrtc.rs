//! Bindings to NVRTC, the library that compiles CUDA C++ at run time. It needs neither a device nor a driver.
//!
//! Invariant: a missing library or function is an error that names it, never a panic.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::Library;

use super::architecture::Architecture;
use super::library;
use super::source::Source;
use crate::KernelError;
pub use crate::cuda_types::NvrtcVersion;

/// Names and paths under which the library is searched for, newest version first.
const SEARCH_PATHS: [&str; 4] =
    ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "/usr/local/cuda/lib64/libnvrtc.so"];
/// The first version with C++20 and all functions that are used here.
const OLDEST: &str = "NVRTC 12.0";
/// Maximum length of a log. Longer logs are truncated.
const MAX_LOG_BYTES: usize = 64 << 10;

type Program = *mut c_void;

/// The result of compiling one source.
pub(super) struct Compiled {
    pub cubin: Vec<u8>,
    pub log: String,
}

/// The loaded library.
pub struct Nvrtc {
    functions: Functions,
    version: NvrtcVersion,
    path: PathBuf,
    /// Keeps the functions loaded.
    _library: Library,
}

library::functions! {
    version: "nvrtcVersion" (*mut c_int, *mut c_int) -> c_int,
    architecture_count: "nvrtcGetNumSupportedArchs" (*mut c_int) -> c_int,
    architectures: "nvrtcGetSupportedArchs" (*mut c_int) -> c_int,
    create: "nvrtcCreateProgram" (
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: "nvrtcCompileProgram" (Program, c_int, *const *const c_char) -> c_int,
    destroy: "nvrtcDestroyProgram" (*mut Program) -> c_int,
    cubin_size: "nvrtcGetCUBINSize" (Program, *mut usize) -> c_int,
    cubin: "nvrtcGetCUBIN" (Program, *mut c_char) -> c_int,
    log_size: "nvrtcGetProgramLogSize" (Program, *mut usize) -> c_int,
    log: "nvrtcGetProgramLog" (Program, *mut c_char) -> c_int,
    error_string: "nvrtcGetErrorString" (c_int) -> *const c_char,
}

/// A program that is destroyed when dropped.
struct Owned<'a> {
    functions: &'a Functions,
    program: Program,
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `create` and destroyed once. Nothing can be done about a failure.
        unsafe { (self.functions.destroy)(&mut self.program) };
    }
}

impl Nvrtc {
    /// Opens the library at this path, or the newest one that the system finds. The caller must trust the file, because its
    /// code is executed.
    pub fn open(path: Option<&Path>) -> Result<Self, KernelError> {
        let (library, path) =
            library::open(path, &SEARCH_PATHS).map_err(|tried| KernelError::NoNvrtc { tried })?;
        let lacking = |symbol| KernelError::LibraryFunction {
            library: path.display().to_string(),
            symbol,
            oldest: OLDEST,
        };
        // SAFETY: the types are those of nvrtc.h, which are the same in all its versions.
        let functions = unsafe { Functions::find(&library, lacking) }?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the function writes two integers.
        let code = unsafe { (functions.version)(&mut major, &mut minor) };
        functions.check("nvrtcVersion", code)?;
        Ok(Nvrtc { functions, version: NvrtcVersion { major, minor }, path, _library: library })
    }

    /// Returns the version of the library that was loaded.
    pub fn version(&self) -> NvrtcVersion {
        self.version
    }

    /// Returns the name or path under which the library was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that the library supports this architecture.
    pub(super) fn check_architecture(&self, architecture: Architecture) -> Result<(), KernelError> {
        let functions = &self.functions;
        let mut count = 0;
        // SAFETY: the function writes one integer.
        let code = unsafe { (functions.architecture_count)(&mut count) };
        functions.check("nvrtcGetNumSupportedArchs", code)?;
        let mut known = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: there is room for as many integers as the library reported above.
        let code = unsafe { (functions.architectures)(known.as_mut_ptr()) };
        functions.check("nvrtcGetSupportedArchs", code)?;
        match known.contains(&architecture.number()) {
            true => Ok(()),
            false => Err(KernelError::OldNvrtc {
                version: self.version,
                architecture,
                oldest: architecture.oldest_nvrtc(),
            }),
        }
    }

    /// Compiles a source for a device of this architecture.
    pub(super) fn compile(
        &self,
        source: Source,
        architecture: Architecture,
        options: &[String],
    ) -> Result<Compiled, KernelError> {
        let functions = &self.functions;
        let (text, name) = (c_string(source.text), c_string(source.name));
        let headers = source.headers();
        let texts: Vec<CString> = headers.iter().map(|header| c_string(header.text)).collect();
        let names: Vec<CString> = headers.iter().map(|header| c_string(header.name)).collect();
        let options: Vec<CString> = options.iter().map(|option| c_string(option)).collect();
        let pointers = |strings: &[CString]| strings.iter().map(|string| string.as_ptr()).collect::<Vec<_>>();
        let (texts_at, names_at, options_at) = (pointers(&texts), pointers(&names), pointers(&options));
        let mut program = std::ptr::null_mut();
        // SAFETY: the strings are null-terminated, as many as the count says, and alive until the program is destroyed.
        let code = unsafe {
            (functions.create)(
                &mut program,
                text.as_ptr(),
                name.as_ptr(),
                headers.len() as c_int,
                texts_at.as_ptr(),
                names_at.as_ptr(),
            )
        };
        functions.check("nvrtcCreateProgram", code)?;
        let owned = Owned { functions, program };
        // SAFETY: the program was created above; there are as many options as the count says.
        let outcome = unsafe { (functions.compile)(program, options_at.len() as c_int, options_at.as_ptr()) };
        let log = functions.output("nvrtcGetProgramLog", program, functions.log_size, functions.log)?;
        let log = String::from_utf8_lossy(&log[..log.len().min(MAX_LOG_BYTES)]);
        let log = log.trim_end_matches('\0').trim_end().to_owned();
        if outcome != 0 && !log.is_empty() {
            return Err(KernelError::Compilation { source_name: source.name, architecture, log });
        }
        functions.check("nvrtcCompileProgram", outcome)?;
        let cubin = functions.output("nvrtcGetCUBIN", program, functions.cubin_size, functions.cubin)?;
        drop(owned);
        Ok(Compiled { cubin, log })
    }
}

impl Functions {
    fn check(&self, call: &'static str, code: c_int) -> Result<(), KernelError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the function returns a constant string for any code.
        let reason = unsafe { CStr::from_ptr((self.error_string)(code)) };
        Err(KernelError::Nvrtc { call, reason: reason.to_string_lossy().into_owned() })
    }

    /// Gets an output of a program with two calls, one for its length and one for its bytes.
    fn output(
        &self,
        call: &'static str,
        program: Program,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, KernelError> {
        let mut bytes = 0;
        // SAFETY: the program is alive, and the function writes the size.
        self.check(call, unsafe { size(program, &mut bytes) })?;
        let mut out = vec![0u8; bytes];
        // SAFETY: there is room for as many bytes as the library reported above.
        self.check(call, unsafe { get(program, out.as_mut_ptr().cast()) })?;
        Ok(out)
    }
}

fn c_string(text: &str) -> CString {
    CString::new(text).expect("sources and options contain no zero byte")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_for_a_missing_library_names_the_package() {
        let error =
            Nvrtc::open(Some(Path::new("/nowhere/libnvrtc.so"))).err().expect("the library does not exist");
        let text = error.to_string();
        assert!(text.contains("/nowhere/libnvrtc.so") && text.contains("nvidia-cuda-nvrtc"), "{text}");
    }

    #[test]
    fn a_wrong_library_lacks_functions() {
        // The C library is on every machine that runs this.
        let error = Nvrtc::open(Some(Path::new("libc.so.6"))).err().expect("not NVRTC");
        assert!(matches!(&error, KernelError::LibraryFunction { symbol: "nvrtcVersion", .. }), "{error}");
        assert!(error.to_string().contains("12.0 or newer"), "{error}");
    }
}
