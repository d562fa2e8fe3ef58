//! The empty implementation, for builds without fault injection.
use crate::sql::Connection;

#[derive(Clone, Copy)]
pub(crate) enum Moment {
    Begin,
    Write,
    Commit,
    Committed,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Faults;

impl Faults {
    #[inline]
    pub(crate) fn are_writes_separate(&self) -> bool {
        false
    }

    #[inline]
    pub(crate) async fn meet(
        &self,
        _moment: Moment,
        _connection: &mut Connection,
    ) -> Result<(), sqlx::Error> {
        Ok(())
    }
}
