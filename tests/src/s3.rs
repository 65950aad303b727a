//! A real S3 server: s3s, which checks every signature, over the directory store of s3s-fs.
//!
//! What s3s-fs leaves out and every S3 has is added around it: conditions on reads (`If-Match` and
//! `If-None-Match` against the `ETag` that the server itself answered with), suffix ranges longer than the object,
//! and counters of what was asked. The signature is checked first; a refused request never reaches the conditions.

use crate::origin::{Counters, Counts};
use http::{Method, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use s3s::auth::SimpleAuth;
use s3s::dto::{
    AbortMultipartUploadInput, AbortMultipartUploadOutput, CompleteMultipartUploadInput,
    CompleteMultipartUploadOutput, CreateMultipartUploadInput, CreateMultipartUploadOutput,
    DeleteObjectInput, DeleteObjectOutput, DeleteObjectsInput, DeleteObjectsOutput, GetObjectInput,
    GetObjectOutput, HeadBucketInput, HeadBucketOutput, HeadObjectInput, HeadObjectOutput,
    ListObjectsV2Input, ListObjectsV2Output, PutObjectInput, PutObjectOutput, Range, UploadPartInput,
    UploadPartOutput,
};
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{S3, S3Request, S3Response, S3Result};
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The server, not yet listening.
#[derive(Clone)]
pub struct S3Origin {
    service: S3Service,
    counts: Arc<Counters>,
}

impl S3Origin {
    /// Serves the directory `root`: each directory in it is a bucket. One pair of keys opens everything.
    ///
    /// # Errors
    /// When `root` is not a directory that can be used.
    pub fn new(root: &Path, access_key: &str, secret_key: &str) -> anyhow::Result<Self> {
        let store = s3s_fs::FileSystem::new(root)
            .map_err(|error| anyhow::anyhow!("{}: {error:?}", root.display()))?;
        let mut builder = S3ServiceBuilder::new(Store(store));
        builder.set_auth(SimpleAuth::from_single(access_key, secret_key));
        Ok(Self { service: builder.build(), counts: Arc::default() })
    }

    /// What it has been asked so far; refused requests are counted as asked.
    pub fn counts(&self) -> Counts {
        self.counts.read()
    }

    /// Accepts connections until the task is dropped.
    ///
    /// # Errors
    /// When `address` cannot be bound. The bound address, useful with port 0, goes to `bound` first.
    pub async fn serve(self, address: SocketAddr, bound: impl FnOnce(SocketAddr)) -> std::io::Result<()> {
        let listener = tokio::net::TcpListener::bind(address).await?;
        bound(listener.local_addr()?);
        loop {
            let Ok((stream, _)) = listener.accept().await else { continue };
            drop(stream.set_nodelay(true));
            let origin = self.clone();
            tokio::spawn(async move {
                let service = hyper::service::service_fn(move |request| origin.clone().answer(request));
                let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                // A client that leaves half-way is a part of several tests, not a failure of the server.
                drop(server.serve_connection(TokioIo::new(stream), service).await);
            });
        }
    }

    async fn answer(self, request: http::Request<Incoming>) -> Result<Response<s3s::Body>, s3s::HttpError> {
        let method = request.method().clone();
        self.counts.asked(&method);
        let conditions = [header::IF_MATCH, header::IF_NONE_MATCH]
            .map(|name| request.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned));
        let mut response = hyper::service::Service::call(&self.service, request).await?;
        if (method == Method::GET || method == Method::HEAD) && response.status().is_success() {
            let etag =
                response.headers().get(header::ETAG).and_then(|value| value.to_str().ok()).map(str::to_owned);
            if let Some(status) = etag.and_then(|etag| verdict(&conditions, &etag)) {
                response = instead(status, response.headers());
            }
        }
        self.counts.answered(&method, response.status());
        let length = response.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
        if let (Method::GET, Some(length)) = (method, length.and_then(|value| value.parse().ok())) {
            self.counts.body_bytes.fetch_add(length, Ordering::Relaxed);
        }
        Ok(response)
    }
}

/// The directory store, with ranges such as `bytes=-N` clamped to the object, where s3s-fs 0.14 seeks to before its
/// beginning and fails.
#[derive(Debug)]
struct Store(s3s_fs::FileSystem);

type Answering<'a, T> = Pin<Box<dyn Future<Output = S3Result<S3Response<T>>> + Send + 'a>>;

/// What `async_trait` would write for methods that only hand on.
macro_rules! hand_on {
    ($($name:ident: $input:ident -> $output:ident;)+) => { $(
        fn $name<'store, 'answer>(&'store self, request: S3Request<$input>) -> Answering<'answer, $output>
        where
            'store: 'answer,
            Self: 'answer,
        {
            self.0.$name(request)
        }
    )+ };
}

impl S3 for Store {
    hand_on! {
        head_object: HeadObjectInput -> HeadObjectOutput;
        put_object: PutObjectInput -> PutObjectOutput;
        delete_object: DeleteObjectInput -> DeleteObjectOutput;
        delete_objects: DeleteObjectsInput -> DeleteObjectsOutput;
        list_objects_v2: ListObjectsV2Input -> ListObjectsV2Output;
        head_bucket: HeadBucketInput -> HeadBucketOutput;
        create_multipart_upload: CreateMultipartUploadInput -> CreateMultipartUploadOutput;
        upload_part: UploadPartInput -> UploadPartOutput;
        complete_multipart_upload: CompleteMultipartUploadInput -> CompleteMultipartUploadOutput;
        abort_multipart_upload: AbortMultipartUploadInput -> AbortMultipartUploadOutput;
    }

    fn get_object<'store, 'answer>(
        &'store self,
        mut request: S3Request<GetObjectInput>,
    ) -> Answering<'answer, GetObjectOutput>
    where
        'store: 'answer,
        Self: 'answer,
    {
        Box::pin(async move {
            if let Some(Range::Suffix { length }) = request.input.range {
                let (bucket, key) = (request.input.bucket.clone(), request.input.key.clone());
                let ask =
                    request.clone().map_input(|_| HeadObjectInput { bucket, key, ..Default::default() });
                let size = self.0.head_object(ask).await?.output.content_length.unwrap_or_default();
                request.input.range = Some(Range::Suffix { length: length.min(size.unsigned_abs()) });
            }
            self.0.get_object(request).await
        })
    }
}

/// The 304 or 412 in place of an answer with `headers`: only what S3 repeats there is kept.
fn instead(status: StatusCode, headers: &http::HeaderMap) -> Response<s3s::Body> {
    let body = if status == StatusCode::PRECONDITION_FAILED {
        let text = "At least one of the preconditions you specified did not hold.";
        format!("<Error><Code>PreconditionFailed</Code><Message>{text}</Message></Error>").into()
    } else {
        s3s::Body::empty()
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    for name in [header::ETAG, header::LAST_MODIFIED] {
        if let Some(value) = headers.get(&name) {
            response.headers_mut().insert(name, value.clone());
        }
    }
    response
}

/// The status that `[If-Match, If-None-Match]` turn an answer with `etag` into, if any (RFC 9110, 13.2.2).
fn verdict(conditions: &[Option<String>; 2], etag: &str) -> Option<StatusCode> {
    let bare = |tag: &str| tag.trim().trim_start_matches("W/").trim_matches('"').to_owned();
    let listed = |list: &str| list.split(',').any(|tag| tag.trim() == "*" || bare(tag) == bare(etag));
    let [if_match, if_none_match] = conditions;
    if if_match.as_deref().is_some_and(|list| !listed(list)) {
        return Some(StatusCode::PRECONDITION_FAILED);
    }
    if_none_match.as_deref().is_some_and(listed).then_some(StatusCode::NOT_MODIFIED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_judged_as_s3_judges_them() {
        let judge = |if_match: Option<&str>, if_none_match: Option<&str>| {
            verdict(&[if_match.map(str::to_owned), if_none_match.map(str::to_owned)], "\"abc\"")
                .map(|s| s.as_u16())
        };
        assert_eq!(judge(None, None), None);
        assert_eq!(judge(Some("\"abc\""), None), None);
        assert_eq!(judge(Some("abc"), None), None);
        assert_eq!(judge(Some("\"x\", \"abc\""), None), None);
        assert_eq!(judge(Some("\"x\""), None), Some(412));
        assert_eq!(judge(None, Some("\"abc\"")), Some(304));
        assert_eq!(judge(None, Some("*")), Some(304));
        assert_eq!(judge(None, Some("\"x\"")), None);
        assert_eq!(judge(Some("\"x\""), Some("\"abc\"")), Some(412));
    }
}
