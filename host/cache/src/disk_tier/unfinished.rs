//! The erasures that the disk did not take, or not yet, in a file of the folder, so that the next start makes them before any page
//! is used.

use std::io;
use std::path::Path;

use super::index::EraseFilter;
use super::small_file;
use crate::{Owner, TenantTag};

/// The file of the list in the folder.
const FILE: &str = "unerased";
/// Maximum number of erasures in the list. Instead of more, the next start erases all pages.
const MAX_ERASURES: usize = 4096;

/// The erasures in the order in which they were wanted.
#[derive(Debug, Default)]
pub(super) struct UnfinishedErasures(Vec<EraseFilter>);

impl UnfinishedErasures {
    /// Reads the list of a folder.
    pub fn read(folder: &Path) -> io::Result<UnfinishedErasures> {
        let text = small_file::read(folder, FILE)?;
        // An erasure that cannot be read may have been one of any page.
        let erasures = text.lines().map(|line| parse(line).unwrap_or(EraseFilter::AllHere));
        Ok(UnfinishedErasures(erasures.collect()))
    }

    /// Returns the erasures.
    pub fn list(&self) -> &[EraseFilter] {
        &self.0
    }

    /// Adds erasures, and writes the list to the folder unless it has all of them.
    pub fn add(&mut self, erasures: impl IntoIterator<Item = EraseFilter>, folder: &Path) -> io::Result<()> {
        let mut longer = self.0.clone();
        for which in erasures {
            if longer.contains(&which) {
                continue;
            }
            if longer.len() == MAX_ERASURES {
                longer = vec![EraseFilter::AllHere];
                break;
            }
            longer.push(which);
        }
        match longer == self.0 {
            true => Ok(()),
            false => self.replace(longer, folder),
        }
    }

    /// Empties the list, because the disk has taken all erasures.
    pub fn clear(&mut self, folder: &Path) -> io::Result<()> {
        match self.0.is_empty() {
            true => Ok(()),
            false => self.replace(Vec::new(), folder),
        }
    }

    fn replace(&mut self, erasures: Vec<EraseFilter>, folder: &Path) -> io::Result<()> {
        small_file::replace(folder, FILE, &erasures.iter().map(line).collect::<String>())?;
        self.0 = erasures;
        Ok(())
    }
}

fn line(which: &EraseFilter) -> String {
    match which {
        EraseFilter::All => "all\n".to_owned(),
        EraseFilter::AllHere => "here\n".to_owned(),
        EraseFilter::Tenant(TenantTag(tenant)) => format!("tenant {tenant:016x}\n"),
        EraseFilter::Agent(agent) => format!("agent {agent:016x}\n"),
        EraseFilter::Session(Owner { agent, session }) => format!("session {agent:016x} {session:016x}\n"),
    }
}

fn parse(line: &str) -> Option<EraseFilter> {
    let number = |word: &str| u64::from_str_radix(word, 16).ok();
    match line.split(' ').collect::<Vec<_>>()[..] {
        ["all"] => Some(EraseFilter::All),
        ["here"] => Some(EraseFilter::AllHere),
        ["tenant", tenant] => Some(EraseFilter::Tenant(TenantTag(number(tenant)?))),
        ["agent", agent] => Some(EraseFilter::Agent(number(agent)?)),
        ["session", agent, session] => {
            Some(EraseFilter::Session(Owner { agent: number(agent)?, session: number(session)? }))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn erasures_outlive_a_restart_until_the_disk_has_taken_them() {
        let folder = tempfile::tempdir().unwrap();
        let read = || UnfinishedErasures::read(folder.path()).unwrap().0;
        let all = [
            EraseFilter::Tenant(TenantTag(7)),
            EraseFilter::Agent(u64::MAX),
            EraseFilter::Session(Owner { agent: 1, session: 2 }),
            EraseFilter::AllHere,
            EraseFilter::All,
        ];
        let mut unfinished = UnfinishedErasures::read(folder.path()).unwrap();
        for which in all.into_iter().chain(all) {
            unfinished.add([which], folder.path()).unwrap();
        }
        assert_eq!(read(), all);
        let mode = std::fs::metadata(folder.path().join(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        unfinished.clear(folder.path()).unwrap();
        assert_eq!(read(), []);
        std::fs::write(folder.path().join(FILE), "agent 1\nplanet 2\n").unwrap();
        assert_eq!(read(), [EraseFilter::Agent(1), EraseFilter::AllHere]);
        std::fs::write(folder.path().join(FILE), b"agent 1\nagent \xff\n").unwrap();
        assert_eq!(read(), [EraseFilter::Agent(1), EraseFilter::AllHere], "it is damaged");
    }

    #[test]
    fn more_erasures_than_the_list_has_room_for_become_one_of_all_pages() {
        let folder = tempfile::tempdir().unwrap();
        let many = (0..MAX_ERASURES as u64).map(EraseFilter::Agent).collect();
        let mut unfinished = UnfinishedErasures(many);
        unfinished
            .add([EraseFilter::Agent(u64::MAX), EraseFilter::Agent(u64::MAX - 1)], folder.path())
            .unwrap();
        assert_eq!(UnfinishedErasures::read(folder.path()).unwrap().0, [EraseFilter::AllHere]);
    }
}
