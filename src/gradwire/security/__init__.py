"""Decides which processes may take part in a job: the job's secret, join tokens and certificates.

    secret              the job's secret: its sources, and keys derived from it
    refusal_log         rate-limited log lines about refused callers
    certificate_names   the job and the member that a certificate names
    tokens              join tokens: limited in time and uses, without the job's secret
    admission           two ranks prove the secret to each other before a link carries any data
    certificates        creates a certificate authority and certificates, and reads them
    credentials         TLS contexts from three files: the authority's certificate, this process's certificate, its key
    tls_probe           finds the reason why a TLS connection between two processes fails

The secret itself never crosses a network. Only proofs of it do, and each proof is bound to fresh random numbers.
"""
