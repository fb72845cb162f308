"""Read, write, check and convert JSON files of tuned parameters, in the form of AITER's."""
