//! Finds a shared library of NVIDIA's and its functions where the system may have it.
//!
//! Invariant: what is missing is an error that names it, never a panic. Functions are looked up here because cudarc looks for a
//! library of its own version only, at no path of the caller's, and panics where the library or a function is missing.

use std::error::Error as _;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::gpu;

/// Declares `Functions`: what is called of a library, by these symbols and types.
macro_rules! functions {
    ($($field:ident: $symbol:literal ($($argument:ty),* $(,)?) -> $result:ty),* $(,)?) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// # Safety
            /// The library's functions have these types, and it is kept as long as they are called.
            unsafe fn find(
                library: &libloading::Library,
                lacking: impl Fn(&'static str) -> KernelError,
            ) -> Result<Self, KernelError> {
                // SAFETY: the caller vouches for the types.
                unsafe { Ok(Functions { $($field: *library.get($symbol).map_err(|_| lacking($symbol))?,)* }) }
            }
        }
    };
}
pub(super) use functions;

/// The library at this place, or at the first of these that there is one at; or what was tried. Names without a folder are found
/// as the system finds libraries. The caller vouches for the file: its code is run.
pub(super) fn open(place: Option<&Path>, places: &[&str]) -> Result<(Library, PathBuf), String> {
    let places: Vec<PathBuf> = match place {
        Some(place) => vec![place.to_owned()],
        None => for_driver(places, gpu::driver_major()).iter().map(PathBuf::from).collect(),
    };
    let mut tried = Vec::new();
    for place in places {
        // SAFETY: NVIDIA's libraries do nothing when they are loaded.
        match unsafe { Library::new(&place) } {
            Ok(library) => return Ok((library, place)),
            Err(error) => tried.push(reason(&place, &error)),
        }
    }
    Err(tried.join(", "))
}

/// What is newer than the driver comes last: drivers run what was made for their own major version or an older one.
fn for_driver<'a>(places: &[&'a str], driver: Option<i32>) -> Vec<&'a str> {
    let is_newer = |place: &&str| {
        let major = place.rsplit_once(".so.").and_then(|(_, major)| major.parse::<i32>().ok());
        major.zip(driver).is_some_and(|(major, driver)| major > driver)
    };
    let mut places = places.to_vec();
    places.sort_by_key(is_newer);
    places
}

/// Which file was tried, and what the system's loader said unless it is that there is none.
fn reason(place: &Path, error: &libloading::Error) -> String {
    let said = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    let name = place.display();
    if said.contains("No such file") { name.to_string() } else { format!("{name}: {said}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_newer_than_the_driver_is_the_last_choice() {
        let places = ["libx.so.13", "libx.so.12", "libx.so"];
        assert_eq!(for_driver(&places, None), places);
        assert_eq!(for_driver(&places, Some(13)), places);
        assert_eq!(for_driver(&places, Some(12)), ["libx.so.12", "libx.so", "libx.so.13"]);
    }
}
