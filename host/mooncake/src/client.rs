//! A client of a Mooncake store, through the functions of the library.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::ptr::null;
use std::time::Duration;

use crate::arena::{Lane, Region};
use crate::library::{Functions, Handle, Library};
use crate::objects::{Failure, Objects};
use crate::settings::Settings;

/// Bytes that the library takes for transfers that are not made in place. This host makes none.
const OWN_BUFFER_BYTES: u64 = 16 << 20;
/// Time in which a master accepts a connection.
const CONNECT_TIME: Duration = Duration::from_secs(2);
/// The code for an object that does not exist.
const NOT_FOUND: i64 = -704;
/// The codes for an object that somebody puts, reads or copies at this moment. The master works.
const IN_USE: [i64; 3] = [-703, -706, -708];

/// A client that is connected to the master and gives it a segment of this host's memory.
pub(crate) struct Client {
    functions: Functions,
    handle: Handle,
}

// SAFETY: the library's client is made for several threads: its own binding for Python calls it from all threads at once.
unsafe impl Send for Client {}
// SAFETY: as above.
unsafe impl Sync for Client {}

impl Client {
    /// Connects to the master, which may take seconds, and registers the memory of the lanes.
    pub fn connect(library: &Library, settings: &Settings, regions: &[Region]) -> Result<Client, Failure> {
        // The library tries for a minute and a half to reach a master that is away.
        if !is_listening(&settings.master) {
            return Err(Failure::Unreached { master: settings.master.clone() });
        }
        let functions = library.functions;
        let texts =
            [&settings.hostname, &settings.metadata, &settings.protocol, &settings.devices, &settings.master];
        // Settings with a NUL were refused when they were read.
        let [hostname, metadata, protocol, devices, master] =
            texts.map(|text| CString::new(text.as_str()).unwrap_or_default());
        // SAFETY: `create` has no preconditions.
        let handle = unsafe { (functions.create)() };
        if handle.is_null() {
            return Err(Failure::Master { call: "create", code: 0 });
        }
        let client = Client { functions, handle };
        // SAFETY: the handle is that of a client, and the library copies the texts, which live until the call returns.
        let code = unsafe {
            (functions.setup)(
                handle,
                hostname.as_ptr(),
                metadata.as_ptr(),
                settings.segment_bytes,
                OWN_BUFFER_BYTES,
                protocol.as_ptr(),
                devices.as_ptr(),
                master.as_ptr(),
            )
        };
        checked("setup", code)?;
        for region in regions {
            // SAFETY: the region is memory that is never freed.
            let code =
                unsafe { (functions.register_buffer)(handle, region.start.as_ptr().cast(), region.bytes) };
            checked("register_buffer", code)?;
        }
        Ok(client)
    }
}

impl Objects for Client {
    fn exist(&self, names: &[CString]) -> Result<Vec<bool>, Failure> {
        let pointers = pointers(names);
        let mut found: Vec<c_int> = vec![-1; names.len()];
        // SAFETY: there are as many pointers to texts that end with NUL, and as many results, as the count says.
        let code = unsafe {
            (self.functions.batch_is_exist)(
                self.handle,
                pointers.as_ptr(),
                pointers.len(),
                found.as_mut_ptr(),
            )
        };
        checked("batch_is_exist", code)?;
        // Any other code of an object is one of the master, which answers for all of them.
        match found.iter().map(|code| i64::from(*code)).find(|code| *code < 0 && !is_absent(*code)) {
            Some(code) => Err(Failure::Master { call: "batch_is_exist", code }),
            None => Ok(found.into_iter().map(|code| code == 1).collect()),
        }
    }

    fn put(&self, lane: &mut Lane, names: &[CString], objects: &[Vec<u8>]) -> Result<usize, Failure> {
        let count = names.len().min(objects.len());
        let (names, objects) = (&names[..count], &objects[..count]);
        let Some(places) = lane.fill(objects) else { return Err(Failure::Transfer { code: 0 }) };
        let (pointers, sizes) = (pointers(names), objects.iter().map(Vec::len).collect::<Vec<usize>>());
        let mut results: Vec<c_int> = vec![-1; count];
        // SAFETY: there are as many names, places, sizes and results as the count says, and each place has as many bytes in
        // registered memory as its size says. No configuration means one replica.
        let code = unsafe {
            (self.functions.batch_put_from)(
                self.handle,
                pointers.as_ptr(),
                places.as_ptr(),
                sizes.as_ptr(),
                count,
                null(),
                results.as_mut_ptr(),
            )
        };
        // An object that exists already counts as stored.
        let stored = results.iter().filter(|code| **code == 0).count();
        let failed = results.iter().find(|code| **code != 0).map(|code| i64::from(*code));
        match failed.or((code != 0).then_some(i64::from(code))) {
            Some(code) if stored == 0 => Err(Failure::Transfer { code }),
            _ => Ok(stored),
        }
    }

    fn get(&self, lane: &mut Lane, names: &[CString], bytes: usize) -> Result<Vec<Option<Vec<u8>>>, Failure> {
        let sizes = vec![bytes; names.len()];
        let Some(places) = lane.places(&sizes) else { return Err(Failure::Transfer { code: 0 }) };
        let pointers = pointers(names);
        let mut results: Vec<i64> = vec![-1; names.len()];
        // SAFETY: there are as many names, places, sizes and results as the count says, and each place has as many bytes in
        // registered memory as its size says.
        let code = unsafe {
            (self.functions.batch_get_into)(
                self.handle,
                pointers.as_ptr(),
                places.as_ptr(),
                sizes.as_ptr(),
                names.len(),
                results.as_mut_ptr(),
            )
        };
        let images: Vec<Option<Vec<u8>>> = results
            .iter()
            .enumerate()
            .map(|(at, read)| (*read == bytes as i64).then(|| lane.copy(at, bytes)).flatten())
            .collect();
        if images.iter().any(Option::is_some) || images.is_empty() {
            return Ok(images);
        }
        let failed = results.iter().copied().find(|code| *code < 0 && !is_absent(*code));
        match failed.or((code != 0).then_some(i64::from(code))) {
            Some(code) => Err(Failure::Transfer { code }),
            None => Ok(images),
        }
    }

    fn remove(&self, name: &CStr) -> Result<bool, Failure> {
        // SAFETY: the name ends with NUL. Force removes an object that was read a moment ago, too.
        let code = unsafe { (self.functions.remove)(self.handle, name.as_ptr(), 1) };
        match i64::from(code) {
            0 | NOT_FOUND => Ok(true),
            code if IN_USE.contains(&code) => Ok(false),
            code => Err(Failure::Master { call: "remove", code }),
        }
    }

    fn remove_beginning(&self, prefix: &str) -> Result<u64, Failure> {
        let pattern = CString::new(format!("^{prefix}.*")).unwrap_or_default();
        // SAFETY: the pattern ends with NUL.
        let removed = unsafe { (self.functions.remove_by_regex)(self.handle, pattern.as_ptr(), 1) };
        u64::try_from(removed).map_err(|_| Failure::Master { call: "remove_by_regex", code: removed })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // SAFETY: the handle is that of a client, and nobody uses it afterwards.
        unsafe { (self.functions.destroy)(self.handle) };
    }
}

/// Returns whether something accepts connections at an address.
fn is_listening(address: &str) -> bool {
    let mut found = address.to_socket_addrs().into_iter().flatten();
    found.any(|address| TcpStream::connect_timeout(&address, CONNECT_TIME).is_ok())
}

/// Returns whether a code is that of an object that cannot be read because it does not exist, or not yet.
fn is_absent(code: i64) -> bool {
    code == NOT_FOUND || IN_USE.contains(&code)
}

fn pointers(names: &[CString]) -> Vec<*const c_char> {
    names.iter().map(|name| name.as_ptr()).collect()
}

fn checked(call: &'static str, code: c_int) -> Result<(), Failure> {
    match code {
        0 => Ok(()),
        code => Err(Failure::Master { call, code: i64::from(code) }),
    }
}
