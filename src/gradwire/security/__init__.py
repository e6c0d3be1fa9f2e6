"""Who may take part in a job.

    secret.py        the job's secret: where it comes from, and keys derived from it
    admission.py     how two ranks prove the secret to each other before a link carries anything
    identity.py      the job and the member that a certificate speaks for
    certificates.py  makes an authority and certificates
    tls.py           TLS from the files of an authority, a certificate and a key
    probe.py         why two processes cannot speak TLS to each other
    tokens.py        invitations to a job that expire and do not give its secret away

The secret itself never crosses a network; what crosses are proofs bound to fresh random numbers.
"""
