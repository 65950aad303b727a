//! What the control plane remembers: one ordered file, changed only by transactions.
//!
//! ```text
//!   meta        schema, revision                     numbers
//!   accelerator policy key node token                rows by name
//!   prewarm purge                                    rows by number, oldest first
//!   placement cluster                                one row each
//! ```
//!
//! A row is a JSON document of the types in `control/api`, so that a newer program reads an older file. The store is
//! the one point of order: a change sees everything before it and is seen whole or not at all. Each change that nodes
//! have to hear of takes the next *revision*; epochs of placements and sequences of purges are revisions, so none of
//! them ever goes back while the file lives.
//!
//! A commit is durable when it returns. It is done in two phases: what is stored comes from outside, and only then
//! is the safety of a half-written commit not a matter of a checksum.

mod rows;

use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use redb::{
    Database, DatabaseError, ReadTransaction, ReadableDatabase, ReadableTable, TableDefinition, TableError,
    WriteTransaction,
};

pub(crate) use rows::{ClusterRow, Number, Row, TokenRow};

/// Raised when an older program could misread a newer file.
const SCHEMA: u64 = 1;
const META: TableDefinition<'static, &str, u64> = TableDefinition::new("meta");

/// The open store.
#[derive(Debug)]
pub(crate) struct Store {
    database: Database,
}

/// Why the store cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// Another process has it.
    #[error("the store {} is in use by another process; stop it, or name another path", .0.display())]
    InUse(PathBuf),
    /// The file cannot be opened.
    #[error("opening the store {}", .path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It was written by a newer program.
    #[error("the store {} has schema {found} and this program knows {SCHEMA}; use the newer program", .path.display())]
    Newer { path: PathBuf, found: u64 },
    /// A row is not what was written.
    #[error("the store holds a {table} `{key}` that cannot be read")]
    Row {
        table: &'static str,
        key: String,
        #[source]
        source: serde_json::Error,
    },
    /// The engine failed.
    #[error("the store failed")]
    Engine(#[source] Box<redb::Error>),
}

impl<E: Into<redb::Error>> From<E> for StoreError {
    fn from(error: E) -> Self {
        Self::Engine(Box::new(error.into()))
    }
}

impl Store {
    /// Opens the file, or makes it, readable by its owner alone: it holds keys' secrets.
    ///
    /// # Errors
    /// Another process has it, it cannot be read, or it is of a newer program.
    pub(crate) fn open(path: &Path) -> Result<Self, StoreError> {
        let failed = |source| StoreError::Open { path: path.to_owned(), source };
        std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(|error| failed(error.into()))?;
        let database = Database::create(path).map_err(|error| match error {
            DatabaseError::DatabaseAlreadyOpen | DatabaseError::LockProtocolMismatch => {
                StoreError::InUse(path.to_owned())
            }
            other => failed(other.into()),
        })?;
        let store = Self { database };
        let found = store.change(|change| {
            let mut meta = change.0.open_table(META)?;
            let found = meta.get("schema")?.map(|value| value.value());
            if found.is_none() {
                meta.insert("schema", SCHEMA)?;
            }
            Ok::<_, StoreError>(found.unwrap_or(SCHEMA))
        })?;
        if found > SCHEMA {
            return Err(StoreError::Newer { path: path.to_owned(), found });
        }
        Ok(store)
    }

    /// A view of one moment.
    ///
    /// # Errors
    /// The engine's.
    pub(crate) fn view(&self) -> Result<View, StoreError> {
        Ok(View(self.database.begin_read()?))
    }

    /// Runs one transaction: kept if `work` succeeds, undone if not. Waits for the change before it, and for the drive.
    ///
    /// # Errors
    /// Those of `work`, and the engine's.
    pub(crate) fn change<T, E: From<StoreError>>(
        &self,
        work: impl FnOnce(&Change) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut transaction =
            self.database.begin_write().map_err(|error| E::from(StoreError::from(error)))?;
        transaction.set_two_phase_commit(true);
        let change = Change(transaction);
        match work(&change) {
            Ok(done) => {
                change.0.commit().map_err(|error| E::from(StoreError::from(error)))?;
                Ok(done)
            }
            Err(error) => {
                change.0.abort().map_err(|error| E::from(StoreError::from(error)))?;
                Err(error)
            }
        }
    }
}

/// Rows as they are, within a view or a change.
pub(crate) trait Look {
    /// The row of this key.
    fn get<R: Row>(&self, key: &str) -> Result<Option<R>, StoreError>;
    /// Every row, in order of keys.
    fn all<R: Row>(&self) -> Result<Vec<R>, StoreError>;
    /// The newest revision; 0 before the first.
    fn revision(&self) -> Result<u64, StoreError> {
        self.number("revision")
    }
    /// A number of the `meta` table; 0 where there is none.
    fn number(&self, name: &'static str) -> Result<u64, StoreError>;
}

/// The store at one moment.
pub(crate) struct View(ReadTransaction);

/// One transaction.
pub(crate) struct Change(WriteTransaction);

impl Look for View {
    fn get<R: Row>(&self, key: &str) -> Result<Option<R>, StoreError> {
        match self.0.open_table(R::TABLE) {
            Ok(table) => get_in(&table, key),
            Err(TableError::TableDoesNotExist(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn all<R: Row>(&self) -> Result<Vec<R>, StoreError> {
        match self.0.open_table(R::TABLE) {
            Ok(table) => all_in(&table),
            Err(TableError::TableDoesNotExist(_)) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        }
    }

    fn number(&self, name: &'static str) -> Result<u64, StoreError> {
        match self.0.open_table(META) {
            Ok(table) => Ok(table.get(name)?.map_or(0, |value| value.value())),
            Err(TableError::TableDoesNotExist(_)) => Ok(0),
            Err(error) => Err(error.into()),
        }
    }
}

impl Look for Change {
    fn get<R: Row>(&self, key: &str) -> Result<Option<R>, StoreError> {
        get_in(&self.0.open_table(R::TABLE)?, key)
    }

    fn all<R: Row>(&self) -> Result<Vec<R>, StoreError> {
        all_in(&self.0.open_table(R::TABLE)?)
    }

    fn number(&self, name: &'static str) -> Result<u64, StoreError> {
        Ok(self.0.open_table(META)?.get(name)?.map_or(0, |value| value.value()))
    }
}

impl Change {
    /// Writes a row, in the place of the one with its key.
    pub(crate) fn put<R: Row>(&self, row: &R) -> Result<(), StoreError> {
        let bytes = serde_json::to_vec(row).expect("rows are plain data");
        self.0.open_table(R::TABLE)?.insert(row.key().as_str(), bytes.as_slice())?;
        Ok(())
    }

    /// Removes the row of this key; whether there was one.
    pub(crate) fn delete<R: Row>(&self, key: &str) -> Result<bool, StoreError> {
        Ok(self.0.open_table(R::TABLE)?.remove(key)?.is_some())
    }

    /// Sets a number of the `meta` table. None of them may go back.
    pub(crate) fn raise(&self, name: &'static str, value: u64) -> Result<(), StoreError> {
        let held = self.number(name)?;
        assert!(value >= held, "{name} would go back from {held} to {value}");
        self.0.open_table(META)?.insert(name, value)?;
        Ok(())
    }

    /// Takes the next revision.
    pub(crate) fn next_revision(&self) -> Result<u64, StoreError> {
        let next = self.revision()? + 1;
        self.raise("revision", next)?;
        Ok(next)
    }
}

fn get_in<R: Row>(
    table: &impl ReadableTable<&'static str, &'static [u8]>,
    key: &str,
) -> Result<Option<R>, StoreError> {
    table.get(key)?.map(|value| parse(key, value.value())).transpose()
}

fn all_in<R: Row>(table: &impl ReadableTable<&'static str, &'static [u8]>) -> Result<Vec<R>, StoreError> {
    let mut rows = Vec::new();
    for entry in table.iter()? {
        let (key, value) = entry?;
        rows.push(parse(key.value(), value.value())?);
    }
    Ok(rows)
}

fn parse<R: Row>(key: &str, bytes: &[u8]) -> Result<R, StoreError> {
    serde_json::from_slice(bytes).map_err(|source| StoreError::Row {
        table: R::NAME,
        key: key.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests;
