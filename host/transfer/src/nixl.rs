//! Bindings to the C functions of NIXL: an agent with the backend UCX that registers one ring and reads the memory of peers.
//!
//! An agent is never destroyed: with a READ in flight, that aborts the process of the peer. The helper ends by being killed
//! instead, which a peer survives. Only what belongs to a READ is freed, once it has ended.
//!
//! Invariant: the library gets only addresses inside the registered ring to write to, and a READ is released only after it has
//! ended.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::time::Instant;

use libloading::Library;

use crate::error::TransferError;
use crate::mapping::Mapping;
use crate::message::{Block, MAX_IMAGES, MAX_METADATA_BYTES, MAX_NAME_BYTES, Peer};

type Handle = *mut c_void;

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 1;
/// The kind of memory of a processor.
const DRAM: c_int = 0;
const READ: c_int = 0;
/// The library locks its state for each call.
const STRICT_LOCKS: c_int = 1;
/// Longest time until the library's thread looks for work again that it was not woken for. Without it, the thread of an idle
/// helper took 0.35 of a core, with it 0.01, and a READ of 16 pages over TCP took no longer.
const PROGRESS_DELAY_US: u64 = 1_000;
const UCX: &CStr = c"UCX";
/// Maximum number of peers whose metadata is kept. Beyond it, the one that was not used for longest is forgotten.
const MAX_PEERS: usize = 256;

/// The options of an agent, as the library has them.
#[repr(C)]
struct AgentConfig {
    enable_progress_thread: bool,
    enable_listen_thread: bool,
    listen_port: c_int,
    thread_sync: c_int,
    workers: c_uint,
    progress_delay_us: u64,
    listen_delay_us: u64,
    capture_telemetry: bool,
}

/// Declares the functions with their types. The names in the library begin with `nixl_capi_`.
macro_rules! functions {
    ($($name:ident($($argument:ty),* $(,)?);)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            /// Looks up all functions. The error is the name of one that does not exist.
            ///
            /// # Safety
            /// The functions of the library have these types, and the library stays loaded as long as they are called.
            unsafe fn find(library: &Library) -> Result<Self, &'static str> {
                // SAFETY: the caller guarantees the types.
                unsafe {
                    Ok(Functions {
                        $($name: {
                            let symbol = concat!("nixl_capi_", stringify!($name));
                            *library.get(symbol).map_err(|_| symbol)?
                        },)*
                    })
                }
            }
        }
    };
}

functions! {
    create_configured_agent(*const c_char, *const AgentConfig, *mut Handle);
    get_plugin_params(Handle, *const c_char, *mut Handle, *mut Handle);
    create_backend(Handle, *const c_char, Handle, *mut Handle);
    create_opt_args(*mut Handle);
    opt_args_add_backend(Handle, Handle);
    create_reg_dlist(c_int, *mut Handle);
    reg_dlist_add_desc(Handle, usize, usize, u64, *const c_void, usize);
    destroy_reg_dlist(Handle);
    register_mem(Handle, Handle, Handle);
    get_local_md(Handle, *mut *mut c_void, *mut usize);
    load_remote_md(Handle, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md(Handle, *const c_char);
    create_xfer_dlist(c_int, *mut Handle);
    xfer_dlist_add_desc(Handle, usize, usize, u64);
    destroy_xfer_dlist(Handle);
    create_xfer_req(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post_xfer_req(Handle, Handle, Handle);
    get_xfer_status(Handle, Handle);
    release_xfer_req(Handle, Handle);
    destroy_xfer_req(Handle);
}

/// The agent of this process. It is used by one thread.
pub(crate) struct Nixl {
    functions: Functions,
    agent: Handle,
    options: Handle,
    ring: Mapping,
    /// The names of the peers whose metadata was loaded, and when each was used last.
    peers: HashMap<String, Instant>,
    /// Keeps the functions loaded.
    _library: Library,
}

/// A READ that was posted.
#[derive(Debug)]
pub(crate) struct Read {
    request: Handle,
    own: Handle,
    theirs: Handle,
    /// The peer that is read.
    peer: String,
}

/// How far a READ is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    UnderWay,
    /// All blocks are in the ring.
    Done,
    /// The library has given up with this status, and writes no more.
    Failed(i32),
}

impl Nixl {
    /// Loads the library, and starts an agent that lets others read the ring. The caller must trust the file, because its
    /// code is executed.
    pub(crate) fn start(library: &Path, name: &str, ring: Mapping) -> Result<Nixl, TransferError> {
        let shown = library.display().to_string();
        // SAFETY: the operator names the library. What it does when it is loaded, it does in a process that may die.
        let loaded = unsafe { Library::new(library) };
        let loaded = loaded.map_err(|error| TransferError::Load {
            library: shown.clone(),
            reason: std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string),
        })?;
        // SAFETY: the types are those of the C header of this version, and the library is kept beside the functions.
        let functions = unsafe { Functions::find(&loaded) };
        let functions = functions.map_err(|symbol| TransferError::Function { library: shown, symbol })?;
        let name = c_name(name)?;
        let config = AgentConfig {
            enable_progress_thread: true,
            enable_listen_thread: false,
            listen_port: 0,
            thread_sync: STRICT_LOCKS,
            workers: 1,
            progress_delay_us: PROGRESS_DELAY_US,
            listen_delay_us: 0,
            capture_telemetry: false,
        };
        let (mut agent, mut options) = (null_mut(), null_mut());
        // SAFETY: the name and the options live during the call, which writes one handle.
        let status = unsafe { (functions.create_configured_agent)(name.as_ptr(), &config, &mut agent) };
        check("create_configured_agent", status)?;
        let (mut kinds, mut parameters, mut backend) = (null_mut(), null_mut(), null_mut());
        // SAFETY: the agent was created above, and the calls write the handles that the next ones take. The parameters are kept,
        // because the backend may refer to them.
        unsafe {
            let status = (functions.get_plugin_params)(agent, UCX.as_ptr(), &mut kinds, &mut parameters);
            check("get_plugin_params", status)?;
            check(
                "create_backend",
                (functions.create_backend)(agent, UCX.as_ptr(), parameters, &mut backend),
            )?;
            check("create_opt_args", (functions.create_opt_args)(&mut options))?;
            check("opt_args_add_backend", (functions.opt_args_add_backend)(options, backend))?;
        }
        let nixl = Nixl { functions, agent, options, ring, peers: HashMap::new(), _library: loaded };
        nixl.register()?;
        Ok(nixl)
    }

    /// Lets peers read the ring.
    fn register(&self) -> Result<(), TransferError> {
        let functions = &self.functions;
        let mut list = null_mut();
        // SAFETY: the list is created, filled and destroyed here; the ring stays mapped until the process ends.
        unsafe {
            check("create_reg_dlist", (functions.create_reg_dlist)(DRAM, &mut list))?;
            let (base, bytes) = (self.ring.base(), self.ring.bytes());
            check("reg_dlist_add_desc", (functions.reg_dlist_add_desc)(list, base, bytes, 0, null(), 0))?;
            let status = (functions.register_mem)(self.agent, list, self.options);
            (functions.destroy_reg_dlist)(list);
            check("register_mem", status)
        }
    }

    /// Returns what peers need to read the ring.
    pub(crate) fn metadata(&self) -> Result<Vec<u8>, TransferError> {
        let (mut data, mut bytes) = (null_mut(), 0);
        // SAFETY: the call writes an address that `malloc` returned, and how many bytes are there. They are copied and freed.
        unsafe {
            check("get_local_md", (self.functions.get_local_md)(self.agent, &mut data, &mut bytes))?;
            if data.is_null() {
                return Err(TransferError::Nixl { call: "get_local_md", status: SUCCESS });
            }
            let copy = std::slice::from_raw_parts(data.cast::<u8>(), bytes).to_vec();
            libc::free(data);
            Ok(copy)
        }
    }

    /// Returns the address of the first byte of the ring.
    pub(crate) fn base(&self) -> u64 {
        self.ring.base() as u64
    }

    /// Begins to read blocks of a peer into the ring. `under_way` are the READs that have not ended.
    pub(crate) fn read<'a>(
        &mut self,
        peer: &Peer,
        blocks: &[Block],
        under_way: impl Iterator<Item = &'a Read>,
    ) -> Result<Read, TransferError> {
        let ring = self.ring.bytes() as u64;
        if blocks.is_empty() || blocks.len() > MAX_IMAGES {
            return Err(TransferError::Reserved { found: blocks.len(), reserved: MAX_IMAGES });
        }
        let addresses = blocks.iter().map(|Block { own, theirs, bytes }| {
            let outside = TransferError::Block { offset: *own, bytes: *bytes, ring };
            let own = self.ring.address(*own, *bytes).ok_or(outside)?;
            // The library adds both without a look at the sum.
            let reason = "an address is beyond its memory";
            let beyond = || TransferError::Peer { name: peer.name.clone(), reason };
            theirs.checked_add(*bytes).ok_or_else(beyond)?;
            Ok((own, *theirs as usize, *bytes as usize))
        });
        let addresses = addresses.collect::<Result<Vec<_>, TransferError>>()?;
        self.meet(peer, under_way)?;
        let name = c_name(&peer.name)?;
        let functions = &self.functions;
        let (mut own, mut theirs, mut request) = (null_mut(), null_mut(), null_mut());
        // SAFETY: the lists are created here. The own addresses are inside of the ring, which stays mapped; the others are only
        // compared with what the peer has registered. The name lives during the calls.
        let status = unsafe {
            check("create_xfer_dlist", (functions.create_xfer_dlist)(DRAM, &mut own))?;
            check("create_xfer_dlist", (functions.create_xfer_dlist)(DRAM, &mut theirs))?;
            for (own_address, their_address, bytes) in addresses {
                let added = (functions.xfer_dlist_add_desc)(own, own_address, bytes, 0);
                check("xfer_dlist_add_desc", added)?;
                let added = (functions.xfer_dlist_add_desc)(theirs, their_address, bytes, 0);
                check("xfer_dlist_add_desc", added)?;
            }
            let (agent, options) = (self.agent, self.options);
            (functions.create_xfer_req)(agent, READ, own, theirs, name.as_ptr(), &mut request, options)
        };
        let read = Read { request, own, theirs, peer: peer.name.clone() };
        if status != SUCCESS {
            self.destroy_lists(&read);
            return Err(TransferError::Nixl { call: "create_xfer_req", status });
        }
        // SAFETY: the request was created above and is alive.
        let status = unsafe { (functions.post_xfer_req)(self.agent, read.request, self.options) };
        match status {
            SUCCESS | IN_PROGRESS => Ok(read),
            status => {
                self.release(read);
                Err(TransferError::Nixl { call: "post_xfer_req", status })
            }
        }
    }

    /// Returns how far a READ is.
    pub(crate) fn poll(&self, read: &Read) -> Progress {
        // SAFETY: the request is alive until it is released, which takes the READ.
        match unsafe { (self.functions.get_xfer_status)(self.agent, read.request) } {
            SUCCESS => Progress::Done,
            IN_PROGRESS => Progress::UnderWay,
            status => Progress::Failed(status),
        }
    }

    /// Frees what belongs to a READ that has ended.
    pub(crate) fn release(&self, read: Read) {
        // SAFETY: the request is alive, and nothing uses it after this. Nothing can be done about a failure.
        unsafe {
            (self.functions.release_xfer_req)(self.agent, read.request);
            (self.functions.destroy_xfer_req)(read.request);
        }
        self.destroy_lists(&read);
    }

    fn destroy_lists(&self, read: &Read) {
        // SAFETY: both lists were created by `read`, and are destroyed once, with their READ or before there is one.
        unsafe {
            (self.functions.destroy_xfer_dlist)(read.own);
            (self.functions.destroy_xfer_dlist)(read.theirs);
        }
    }

    /// Loads the metadata of a peer, unless it is known.
    fn meet<'a>(
        &mut self,
        peer: &Peer,
        under_way: impl Iterator<Item = &'a Read>,
    ) -> Result<(), TransferError> {
        let unusable = |reason| TransferError::Peer { name: peer.name.clone(), reason };
        if let Some(used) = self.peers.get_mut(&peer.name) {
            *used = Instant::now();
            return Ok(());
        }
        if peer.metadata.is_empty() || peer.metadata.len() > MAX_METADATA_BYTES {
            return Err(unusable("its metadata is empty or too long"));
        }
        c_name(&peer.name)?;
        if self.peers.len() >= MAX_PEERS {
            let busy: Vec<&str> = under_way.map(|read| read.peer.as_str()).collect();
            self.forget_one(&busy);
        }
        let (data, bytes) = (peer.metadata.as_ptr().cast(), peer.metadata.len());
        let mut name = null_mut();
        // SAFETY: the metadata lives during the call, which writes the address of a string that `malloc` returned. It is copied
        // and freed.
        let loaded = unsafe {
            let status = (self.functions.load_remote_md)(self.agent, data, bytes, &mut name);
            check("load_remote_md", status)?;
            let loaded = CStr::from_ptr(name).to_string_lossy().into_owned();
            libc::free(name.cast());
            loaded
        };
        self.peers.insert(loaded.clone(), Instant::now());
        match loaded == peer.name {
            true => Ok(()),
            false => Err(unusable("its metadata is that of another one")),
        }
    }

    /// Forgets the peer that was not used for longest and is not read.
    fn forget_one(&mut self, busy: &[&str]) {
        let idle = self.peers.iter().filter(|(name, _)| !busy.contains(&name.as_str()));
        let Some(name) = idle.min_by_key(|(_, used)| **used).map(|(name, _)| name.clone()) else { return };
        self.peers.remove(&name);
        if let Ok(name) = c_name(&name) {
            // SAFETY: the name lives during the call, and no READ of this peer is under way.
            unsafe { (self.functions.invalidate_remote_md)(self.agent, name.as_ptr()) };
        }
    }
}

fn check(call: &'static str, status: c_int) -> Result<(), TransferError> {
    if status == SUCCESS { Ok(()) } else { Err(TransferError::Nixl { call, status }) }
}

/// Returns the name of an agent for the library.
fn c_name(name: &str) -> Result<CString, TransferError> {
    let named = Some(name).filter(|name| (1..=MAX_NAME_BYTES).contains(&name.len()));
    named.and_then(|name| CString::new(name).ok()).ok_or_else(|| TransferError::Peer {
        name: name.chars().take(MAX_NAME_BYTES).collect(),
        reason: "its name is empty, too long, or has a zero byte",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(library: &str) -> String {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let ring = Mapping::new(&file, 4096).unwrap();
        Nixl::start(Path::new(library), "test/1", ring).err().expect("it is not NIXL").to_string()
    }

    #[test]
    fn a_missing_library_is_an_error_that_says_how_to_get_it() {
        let error = start("/nowhere/libnixl_capi.so");
        assert!(error.contains("/nowhere/libnixl_capi.so") && error.contains("nixl-cu12==1.5.1"), "{error}");
    }

    #[test]
    fn a_wrong_library_lacks_functions() {
        // The C library is on every machine that runs this.
        let error = start("libc.so.6");
        assert!(error.contains("no function nixl_capi_create_configured_agent"), "{error}");
    }

    #[test]
    fn names_that_the_library_cannot_hold_are_errors() {
        assert!(c_name("host/1").is_ok() && c_name(&"a".repeat(MAX_NAME_BYTES)).is_ok());
        for name in ["", "a\0b", &"a".repeat(MAX_NAME_BYTES + 1)] {
            assert!(c_name(name).is_err(), "{name:?}");
        }
    }
}
