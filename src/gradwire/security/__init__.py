"""Credentials: who may take part in a job.

    secret              the job's secret: its sources, and keys derived from it
    refusal_log         rate-limited log lines about refused callers
    certificate_names   job and member in the name of a certificate
    tokens              join tokens: limited in time and uses, without the job's secret
    admission           two ranks prove the secret to each other before a link carries anything
    certificates        makes a certificate authority and certificates, and reads them
    credentials         TLS contexts from the files of authority, certificate and key
    tls_probe           finds out why two processes cannot speak TLS

The secret itself never crosses a network; what crosses are proofs bound to fresh random numbers.
"""
